"""Makes machines into a Ray cluster: `samovar up`, on a rack or in AWS."""
