"""Samovar's packages under one name: folders of the repository, linked here, so that `configs` or `router` of
another program in the same environment is not mixed with ours."""
