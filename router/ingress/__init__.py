"""The application behind the HTTP port: routes, middleware, and the Serve deployment of the ingress.

Its modules are imported one by one: `app` needs transformers.
"""
