"""A deterministic world: nodes, disks, a bucket, a network, replicas, doors and fronts, all from one seed.

`python -m tests.world --seed 7` runs one life of a small cluster, with the product's own code and its own
threads, of which one runs at a time: `scheduler.py` picks which by the seed, and moves the clock when all
wait.
"""
