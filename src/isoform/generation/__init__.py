"""Generation: forward pass, choice of token and stopping as three replaceable parts (Algorithm 6.2)."""

from isoform.generation.forward import Cached, Forward, Function, Uncached
from isoform.generation.generate import Generated, generate
from isoform.generation.search import Beam, Choice, Chooser, Greedy, Hypothesis, Job, Sample, Search
from isoform.generation.stopping import AnyOf, Constraints, EndOfSequence, Stopping, StopSequences

__all__ = [
    "AnyOf",
    "Beam",
    "Cached",
    "Choice",
    "Chooser",
    "Constraints",
    "EndOfSequence",
    "Forward",
    "Function",
    "Generated",
    "Greedy",
    "Hypothesis",
    "Job",
    "Sample",
    "Search",
    "StopSequences",
    "Stopping",
    "Uncached",
    "generate",
]
