"""Starts, deploys, sizes and simulates a cluster. The top layer: only the command line and tests import it.

Commands import what they need when they run, so its folders export nothing, but for `engines`,
which deployments ask.
"""
