"""Loads the kernels of quantization and dropout on every rank, and finds ranks that lack them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_zpp.config.schema import Config
from megatron_zpp.ops import extension
from megatron_zpp.parallel.initialize import StartupError, World
from megatron_zpp.parallel.ranks_in_words import ranks_in_words


def prepare_kernels(config: Config, world: World, hosts: Sequence[str]) -> str:
    """Loads the kernels and returns lines about them; empty if the run neither quantizes nor has hidden dropout. Every rank must call it.

    Every run loads them where they are built: descents take means with them too, which costs little without them.

    hosts: host name of every rank, in rank order. Raises StartupError on every rank if a rank with a GPU lacks kernels and was not told to
    run without them: all ranks would wait for its reference, which quantizes far more slowly. If no rank has kernels and the run does not
    quantize, it trains: hidden dropout on the reference costs about twice as much as torch's.
    """
    extension.load()
    device = world.device
    quantizes = config.zero.quantizes
    if not quantizes and config.model.hidden_dropout == 0:
        return ""
    own = extension.report(device.type)
    lacking = world.gather_texts("" if extension.has_kernels_for(device.type) else own)
    unasked = world.gather_texts("" if extension.wants_reference(os.environ) else "unasked")
    refused = [text if text and is_unasked else "" for text, is_unasked in zip(lacking, unasked, strict=True)]
    if device.type == "cuda" and any(refused) and (quantizes or not all(lacking)):
        raise StartupError(
            "kernels of quantization and dropout are missing, and every rank would wait for the ranks without them; "
            f"{lacking_ranks(refused, hosts)}. "
            f"Run that command where these ranks run, or set {extension.REFERENCE_VARIABLE}=1 on every rank to train without kernels."
        )
    if not any(lacking):
        return own
    if all(lacking):
        return f"WARNING: {own}" if any(refused) else own
    return f"WARNING: every rank waits for ranks without kernels of quantization and dropout; {lacking_ranks(lacking, hosts)}"


def lacking_ranks(reports: Sequence[str], hosts: Sequence[str]) -> str:
    """The ranks with a report, with their host and that report: `ranks 2, 3 on b: Quantization and dropout run on ...`.

    Empty reports are left out.
    """
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, (report, host) in enumerate(zip(reports, hosts, strict=True)):
        if report:
            ranks_of.setdefault((host, report), []).append(rank)
    return "; ".join(f"{ranks_in_words(ranks)} on {host}: {report.removesuffix('.')}" for (host, report), ranks in ranks_of.items())
