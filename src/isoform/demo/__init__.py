"""The main job: train, evaluate, save, reload and prove a model on the built-in dates."""

from isoform.demo.job import DemoResult, configuration, run

__all__ = ["DemoResult", "configuration", "run"]
