"""A stand-in for the AWS provider: its exact schema, rebuilt from npm, behind Terraform's plugin protocol.

Terraform's own checks (names, types, required, nesting, references, sensitive and write-only values) are
thus real. Not checked, because only the real provider knows: enums (`tests.infra.aws_facts` closes most),
arguments that exclude each other, the form of ARNs, and whatever AWS itself would say.
"""
