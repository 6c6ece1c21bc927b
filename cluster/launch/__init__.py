"""From machines to a Ray cluster: `samovar up`, on a rack or in AWS."""
