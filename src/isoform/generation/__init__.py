"""Generation: forward pass, choice of token and stopping as three replaceable parts (Algorithm 6.2)."""

from isoform.generation.forward import Cached, Compile, Forward
from isoform.generation.generate import Generated, generate
from isoform.generation.search import Beam, Choice, Chooser, Greedy, Hypothesis, Job, Sample, Search
from isoform.generation.stopping import AnyOf, Constraints, EndOfSequence, Stopping, StopSequences
from isoform.generation.whole_rows import Function, Uncached

__all__ = [
    "AnyOf",
    "Beam",
    "Cached",
    "Choice",
    "Chooser",
    "Compile",
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
