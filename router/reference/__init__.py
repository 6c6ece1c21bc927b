"""The OpenAPI document: what a route takes and answers, from the models that parse its requests."""

from samovar.router.reference import answers
from samovar.router.reference.document import Operation, QueryParameter, build_document

__all__ = ["Operation", "QueryParameter", "answers", "build_document"]
