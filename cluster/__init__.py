"""Everything that starts, deploys, sizes and simulates a cluster. The top of the house: only the
command line and tests import it, and commands import what they need when they run; so its folders
export nothing.
"""
