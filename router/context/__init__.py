"""What is put into a prompt besides the request: knowledge, lessons, documents, summaries.

Optional: a service that has none of it switched on imports nothing from here.
"""
