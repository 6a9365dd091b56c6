"""Weights and caches under one memory: a recipe and a spec, searched together."""

from .report import make_report, write_report
from .run import Joint, make_joint
from .settings import JointSettings

__all__ = ["Joint", "JointSettings", "make_joint", "make_report", "write_report"]
