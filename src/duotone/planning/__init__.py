"""Memory and batch sizes of a scheme on a model, before anything runs."""

from duotone.planning.memory import Plan, plan

__all__ = ["Plan", "plan"]
