"""CTranslate2 in a process of its own: it and PyTorch keep threads that slow each other down.

As a module this is that process: it reads a request a line, and answers with seconds and token ids.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Engine:
    """A model of CTranslate2.

    Args:
        folder: what `isoform.export(…, to="ctranslate2")` wrote.
        kind: "Generator" or "Translator".
        compute_type: "float32" or "int8".
        threads: of the process.
    """

    def __init__(self, folder: Path, kind: str, compute_type: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.engine", str(folder), kind, compute_type, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ids: list[list[int]] = []

    def run(self, prompts: list[list[str]], new: int, beams: int) -> float:
        """Generate exactly ``new`` tokens a row; the seconds that the engine took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new, "beams": beams}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the CTranslate2 process ended; its own message stands above")
        found = json.loads(answer)
        self.ids = found["ids"]
        return float(found["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _serve(folder: str, kind: str, compute_type: str, threads: int) -> None:
    import ctranslate2

    engine: Any = getattr(ctranslate2, kind)(
        folder, device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=threads
    )
    for line in sys.stdin:
        asked = json.loads(line)
        new, beams, prompts = asked["new"], asked["beams"], asked["prompts"]
        start = time.perf_counter()
        if kind == "Generator":
            found = engine.generate_batch(
                prompts, max_length=new, min_length=new, beam_size=beams, include_prompt_in_result=False
            )
            ids = [result.sequences_ids[0] for result in found]
        else:
            found = engine.translate_batch(
                prompts, max_decoding_length=new, min_decoding_length=new, beam_size=beams
            )
            # Tokens without a text of their own are called by their row: "<row 17>".
            ids = [[int(token[5:-1]) for token in result.hypotheses[0]] for result in found]
        print(json.dumps({"seconds": time.perf_counter() - start, "ids": ids}), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
