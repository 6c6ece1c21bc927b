"""Where a conversation's KV blocks lie when no pool holds them: tiers, their directory, and who
resumes when.
"""
