"""Where a conversation's KV blocks lie when no pool holds them: tiers, their catalog, and who
resumes when.
"""
