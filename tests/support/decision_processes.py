"""Small processes on which credit rules are measured, see `support.exact_gradients`."""

import math

from support.exact_gradients import Play, Process


def stopper(play: Play) -> float:
    """Up to three decisions to go on, each of which earns .3, or to stop; one parameter for all."""
    for step in range(3):
        if not play.decide(0):
            play.turn(state=step)
            return 0.0
        play.turn(0.3, result=True, state=step, score=step + 1.0)
    return 0.0


def one_search(play: Play) -> float | None:
    """Search or guess; a find (.5) makes the answer right more often. Who refuses to answer has no outcome."""
    found, state = False, 0
    if play.decide(0):
        found = play.chance(0.5)
        play.turn(0.5 if found else 0.0, result=True, state=state, score=float(found))
        state = 1 + found
    honest = play.decide(1)
    play.turn(state=state)
    return float(play.chance(0.75 if found else 0.25)) if honest else None


def searcher(play: Play) -> float:
    """
    Up to three searches, each of which costs .1 and finds the answer by chance; the first find earns .5. The policy
    decides after each whether to go on, by whether it has found something. The outcome is the answer.
    """
    found, state = False, 0
    for step in range(3):
        if not play.decide(1 if found else 0):
            break
        finds = play.chance(0.4)
        play.turn(-0.1 + 0.5 * (finds and not found), result=True, state=state, score=float(found or finds))
        found = found or finds
        state = 2 * (step + 1) + found
    play.turn(state=state)
    return 1.0 if found else 0.2


def two_hops(play: Play) -> float:
    """Two calls that build on each other, each tried twice at most, for .25; without both the outcome is a guess."""
    hops = 0
    for step in range(3):
        state = 3 * step + hops
        if not play.decide(hops):
            play.turn(state=state, score=float(hops))  # malformed: no tool ran
            continue
        works = play.chance(0.8)
        play.turn(0.25 if works else 0.0, result=True, state=state, score=float(hops + works))
        hops += works
        if hops == 2:
            break
    play.turn(state=9 + hops)
    return 1.0 if hops == 2 else 0.125


def late(play: Play) -> float:
    """The first turn decides what the third one earns, if there is one; the second earns by chance alone."""
    right = play.decide(0)
    play.turn(result=True, state=0, score=float(right))
    play.turn(0.5 * play.chance(0.5), result=True, state=1, score=float(right))
    goes_on = play.decide(1)
    if goes_on:
        play.turn(1.0 if right else -0.25, result=True, state=2, score=float(right))
    play.turn(state=2 + goes_on)
    return 0.0


def settled(play: Play) -> float:
    """Three turns that the policy nearly always takes the same way, and an open decision about the outcome."""
    for _ in range(3):
        play.decide(0)
        play.turn(result=True)
    right = play.decide(1)
    play.turn()
    return float(right)


def tasks(number: int, skills: int) -> Process:
    """Tasks that earn 1 / `number` each, the first ones by the first skill; the outcome is 1 if all are right."""

    def play(play: Play) -> float:
        done, right = 0, False
        for step in range(number):
            state = 2 * step + right
            right = play.decide(step * skills // number)
            done += right
            play.turn(right / number, result=True, state=state, score=float(done))
        return float(done == number)

    return play


def paid_searches(turns: int, shaping: float = 0.1) -> Process:
    """
    Design F of benchmarks/reports/designs.md in few turns: a search earns a fifth of the shaping, and makes it less
    likely that the answer, which ends the conversation, is right. Who never answers is not right. A parameter for each
    turn.
    """

    def play(play: Play) -> float:
        for step in range(turns):
            if not play.decide(step):
                play.turn(0.0)
                return float(play.chance(1 - step / turns))
            play.turn(shaping / 5, result=True)
        return 0.0

    return play


def nearly_noise(turns: int, shaping: float = 0.1) -> Process:
    """Design N in few turns: all right calls together earn the shaping, and the outcome is nearly chance."""

    def play(play: Play) -> float:
        right = 0
        for step in range(turns):
            is_right = play.decide(step)
            right += is_right
            play.turn(shaping / turns * is_right, result=True)
        return float(play.chance(0.4 + 0.2 * right / turns))

    return play


def logit(likely: float) -> float:
    """The parameter with which a decision is taken so likely."""
    return math.log(likely / (1 - likely))


PROCESSES: dict[str, tuple[Process, tuple[float, ...]]] = {
    "stopper": (stopper, (0.0,)),
    "one_search": (one_search, (0.3, -0.2)),
    "searcher": (searcher, (0.4, -0.5)),
    "two_hops": (two_hops, (0.2, 0.6)),
    "late": (late, (-0.4, 0.7)),
    "tasks": (tasks(4, 2), (-0.4, -0.4)),
    "mastered": (tasks(4, 2), (1.4, 1.4)),
}
"""By name, each with the parameters at which it is measured."""
