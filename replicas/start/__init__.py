"""The start of a replica: settings and a model directory become an engine with measured prices.

Its modules are imported one by one: `build` needs torch.
"""
