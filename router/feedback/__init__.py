"""Routes of what answers teach: /v1/feedback, and candidates for the knowledge base.

Nothing imports it while `knowledge.enabled` is false.
"""

from router.feedback.feedback_routes import FEEDBACK, feedback_routes

__all__ = ["FEEDBACK", "feedback_routes"]
