"""Why do two Transformers differ? Every fault by name, also where several are stacked (R39)."""

from __future__ import annotations

import dataclasses
import math

from torch import nn

from isoform.verify.align import Model
from isoform.verify.diagnose import losses, steps
from isoform.verify.diagnose.examine import examine
from isoform.verify.diagnose.longer import longer
from isoform.verify.diagnose.probe import alike, fixed, other_weights, reweighted
from isoform.verify.diagnose.report import Diagnosis, Finding, Place
from isoform.verify.diagnose.rounding import coarser
from isoform.verify.inner_padding import same_padding
from isoform.verify.record import Recording, recorded
from isoform.verify.recording import laid_out
from isoform.verify.spool import IN_MEMORY
from isoform.verify.stepping import Step
from isoform.verify.subject import Inputs

__all__ = ["Diagnosis", "Finding", "Place", "diagnose"]


def diagnose(
    reference: nn.Module | Recording,
    candidate: nn.Module | Recording,
    inputs: Inputs | None = None,
    candidate_inputs: Inputs | None = None,
    *,
    probe: bool = True,
    step: Step | None = None,
    candidate_step: Step | None = None,
) -> Diagnosis:
    """Say why two models are not the same function.

    Args:
        reference: one model; a `Recording` of it serves too.
        candidate: the other one. Neither is taken to be the right one.
        inputs: what both read: keyword arguments of ``forward`` as a dict, positional ones as a tuple, or one
            tensor. Not needed for recordings.
        candidate_inputs: the same content in the form that the candidate takes; default: `inputs`.
        probe: also look for faults that these weights hide, by giving both models others, and for those of
            losses and of cached steps, where both models give a loss for ``labels`` or keep a past.
        step: the reference's cached step, (ids ``[B, 1]``, state) → (logits, state); default:
            ``past_key_values``, where the module takes it.
        candidate_step: the candidate's.

    Returns:
        The verdict and every cause that was found. There are no findings with "equivalent" or "noise".

    Raises:
        ShapeError: results of different shape for what should be the same content, streams of other widths.
        DataError: a module without inputs, or whose forward fails on them.
    """
    theirs = inputs if candidate_inputs is None else candidate_inputs
    first = recorded(reference, inputs, "reference", IN_MEMORY)
    plain = recorded(candidate, theirs, "candidate", IN_MEMORY)
    first, second = same_padding(first, laid_out(plain, first))
    turned = any(second.inputs[n].shape != plain.inputs[n].shape for n in plain.reals.values())
    rounding = coarser(first, second)
    a, b = Model(first, rounding), Model(second, rounding)
    found = examine(a, b)
    if isinstance(reference, nn.Module) and isinstance(candidate, nn.Module):
        assert inputs is not None and theirs is not None
        if probe or step is not None or candidate_step is not None:
            found = _beside(found, _around((reference, candidate), (inputs, theirs), (step, candidate_step)))
    if not probe or rounding is not None:
        return found
    if isinstance(reference, nn.Module) and isinstance(candidate, nn.Module) and not turned:
        assert inputs is not None and theirs is not None
        pair = longer(reference, candidate, inputs, theirs)
        if pair is not None:
            pair = same_padding(*pair)
            a, b = Model(pair[0]), Model(pair[1])
    if fixed(a) or fixed(b) or not alike(a, b):
        return found
    ours, other = other_weights(a, b)
    return _with_latent(found, examine(reweighted(a, ours), reweighted(b, other), latent=True))


def _around(
    modules: tuple[nn.Module, nn.Module],
    inputs: tuple[Inputs, Inputs],
    functions: tuple[Step | None, Step | None],
) -> list[Finding]:
    """What one forward pass does not show: the loss, and steps with a cache."""
    loss = losses.check(*modules, *inputs)
    return [*([] if loss is None else [loss]), *steps.check(*modules, *inputs, functions, examine)]


def _beside(found: Diagnosis, more: list[Finding]) -> Diagnosis:
    if not more:
        return found
    return dataclasses.replace(found, verdict="differs", findings=(*found.findings, *more))


def _with_latent(found: Diagnosis, probed: Diagnosis) -> Diagnosis:
    """What the probe shows and the models as given do not."""
    known = set(found.kinds())
    latent = tuple(f for f in probed.findings if f.kind not in known)
    if found.verdict == "differs" and not all(f.kind != "unexplained" for f in found.findings):
        latent = tuple(f for f in latent if f.kind != "unexplained")
    found = dataclasses.replace(found, findings=tuple(_everywhere(f, probed) for f in found.findings))
    if not latent:
        return found
    kept = tuple(f for f in found.findings if not _hides(f, latent))
    return dataclasses.replace(found, verdict="differs", findings=(*kept, *latent))


def _everywhere(finding: Finding, probed: Diagnosis) -> Finding:
    """A finding with the places at which the probe alone shows it."""
    same = (f for f in probed.findings if (f.kind, f.statement) == (finding.kind, finding.statement))
    listed = finding.kind != "unexplained"
    where = tuple(dict.fromkeys([*finding.where, *(p for f in same if listed for p in f.where)]))
    return dataclasses.replace(finding, where=where)


def _hides(finding: Finding, latent: tuple[Finding, ...]) -> bool:
    """Whether these weights make one of the latent causes look like this finding."""
    looks_like = {
        # With unit gains two norms in a row look like one with another ε.
        "norm-eps": ("norm-missing", "norm-placement"),
        # Gains that are kept as 0 for 1 + 0 leave nothing where they are read as they are.
        **(
            dict.fromkeys(("norm-missing", "softcap"), ("norm-offset",))
            if finding.evidence.get("ratio") in (0, math.inf)
            else {}
        ),
    }
    more = [f for f in latent if f.kind in looks_like.get(finding.kind, ())]
    places = {(p.part, p.layer) for f in more for p in f.where}
    return {(p.part, p.layer) for p in finding.where} <= places
