"""Traces an engine's plan. If the tensors do not fit, the error tells what else of the source
would."""

from __future__ import annotations

from collections.abc import Iterator

from instep.engine.member import Member
from instep.errors import InstepError, PlanError
from instep.plan.routes import check_metadata, signature
from instep.protocol import TensorMeta
from instep.source.within import Within

Inside = Iterator[list[Within]]


async def trace(member: Member, tensors: list[TensorMeta], wanted: str, inside: Inside, *, cast: bool, whole: bool) -> None:
    """Runs `Member.trace` on `tensors`, whose signature is `wanted`.

    inside: what else could be pushed of the source. Raises `PlanError` as `Member.trace` does.
    Where this engine would take something that is inside, shown by a trace of it, the error says
    how to push that.
    """
    try:
        await member.trace(tensors, wanted, cast=cast, whole=whole)
    except PlanError as error:
        fitting = await _fitting(member, inside, cast=cast)
        if not fitting:
            raise
        what, how = " or ".join(one.what for one in fitting), " or ".join(one.how for one in fitting)
        next_step = f"no engine was touched: what fits this engine is {what}. Push that: {how}"
        raise PlanError(str(error.args[0]), tensor=error.tensor, next_step=next_step) from error


async def _fitting(member: Member, inside: Inside, *, cast: bool) -> list[Within]:
    for level in inside:
        found = [one for one in level if await _fits(member, one.tensors, cast=cast)]
        if found:
            return found
    return []


async def _fits(member: Member, tensors: list[TensorMeta], *, cast: bool) -> bool:
    try:
        check_metadata(tensors)
        await member.trace(tensors, signature(tensors), cast=cast, whole=True)
    except InstepError:
        return False
    finally:
        member.plan = None
    return True
