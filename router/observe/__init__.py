"""What people and programs see of a running service: the live page and the diagnosis.

Optional, as `context` is.
"""
