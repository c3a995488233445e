"""
The bias and the noise of a credit rule, without sampling: every group that a small process can bring forth is
enumerated with its probability. `sample` draws groups where there are too many.

    def stopper(play):                       # each decision has a parameter of its own; all are 0
        for _ in range(3):
            if not play.decide(0):           # the policy: yes with the probability sigmoid(parameter)
                play.turn()
                return 0.0                   # the outcome reward
            play.turn(0.3, result=True)      # ends the turn
        return 0.0

    measure("reward_to_go", stopper, group_size=4).bias

Axes: M trajectory, P parameter, K turn, N batch of groups, G group member.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mt_grpo.credit.rule import RewardBatch, Rule, Scale, bind_rule


class Play:
    """One pass through a process, in which what is decided and what happens by chance is given."""

    def __init__(self, given: tuple[bool, ...], parameters: tuple[float, ...]) -> None:
        self.taken: list[bool] = []
        self.decisions: list[tuple[int, int]] = []  # of each the place in `taken`, and the turn
        self.probability = 1.0
        self.turns: list[tuple[list[float], float | None, bool, int, float | None]] = []
        self._given = given
        self._parameters = parameters
        self._gradient = [0.0] * len(parameters)

    def decide(self, parameter: int) -> bool:
        """A decision of the policy: yes with the probability sigmoid(parameter). It belongs to the current turn."""
        likely = 1 / (1 + math.exp(-self._parameters[parameter]))
        self.decisions.append((len(self.taken), len(self.turns)))
        yes = self.chance(likely)
        self._gradient[parameter] += 1 - likely if yes else -likely
        return yes

    def chance(self, likely: float) -> bool:
        """Something random that the policy does not decide."""
        yes = self._given[len(self.taken)] if len(self.taken) < len(self._given) else True
        self.taken.append(yes)
        self.probability *= likely if yes else 1 - likely
        return yes

    def turn(
        self, reward: float | None = None, *, result: bool = False, state: int = 0, score: float | None = None
    ) -> None:
        """Ends a turn that began in a state: with its reward, whether a result follows, and the next state's score."""
        self.turns.append((self._gradient, reward, result, state, score))
        self._gradient = [0.0] * len(self._parameters)


Process = Callable[[Play], float | None]
"""Plays one trajectory and returns its outcome reward, `None` for an absent one."""


@dataclass(frozen=True)
class Measurement:
    """The gradient that a rule estimates, over all batches of groups."""

    truth: Tensor  # the gradient of the expected rewards, (P,)
    mean: Tensor  # the expected estimate, (P,)
    std: float  # root of the summed variances of the estimate

    @classmethod
    def of(cls, truth: Tensor, estimates: Tensor, weights: Tensor) -> Measurement:
        """From estimates, shape (N, P), and their probabilities, shape (N,)."""
        mean = weights @ estimates
        return cls(truth, mean, (weights @ (estimates - mean).square()).sum().sqrt().item())

    @property
    def bias(self) -> Tensor:
        """Expected estimate minus truth, shape (P,)."""
        return self.mean - self.truth

    @property
    def cosine(self) -> float:
        """Between the expected estimate and the truth: 1 where the direction is right, 0 for an estimate of 0."""
        product = self.mean.norm() * self.truth.norm()
        return float(self.mean @ self.truth / product) if self.mean.norm() > 1e-12 else 0.0

    @property
    def length(self) -> float:
        """Length of the expected estimate, in lengths of the truth."""
        return float(self.mean.norm() / self.truth.norm())

    @property
    def signal_to_noise(self) -> float:
        """Length of the expected estimate / `std`; 0 for an estimate of 0."""
        return self.mean.norm().item() / self.std if self.mean.norm() > 1e-12 else 0.0


def measure(
    rule: Rule,
    process: Process,
    *,
    group_size: int,
    groups: int = 1,
    parameters: tuple[float, ...] = (0.0,),
    factor: float = 1.0,
    turn_coef: float = 1.0,
    scale_rewards: Scale = "none",
    energies: bool = False,
) -> Measurement:
    """
    The bias and the noise of a rule on a process, for batches of so many groups. With 1 the rule is called once on all
    groups, so it must treat them apart; a rule that looks at other groups needs 2, and much more time. The estimate is
    multiplied by `factor`: G / (G − 1) for rules whose means include the member itself. `turn_coef` is of rule and
    truth; with `energies` the `state_scores` are the squared lengths of the gradients of turns.
    """
    paths = Paths.of(process, parameters, energies)
    members, weights = paths.groups(group_size)
    function, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards=scale_rewards)

    def gradients(rows: Tensor) -> Tensor:
        return factor * paths.estimates(function(paths.batch(rows), **options), rows)

    if groups == 1:
        estimates = gradients(members)
    else:
        batches = list(itertools.combinations_with_replacement(range(len(members)), groups))
        weights = torch.stack([weights[list(chosen)].prod() * orders(chosen) for chosen in batches])
        estimates = torch.stack([gradients(members[list(chosen)]).mean(dim=0) for chosen in batches])
    return Measurement.of(paths.truth(turn_coef), estimates, weights)


def sample(
    rule: Rule,
    process: Process,
    *,
    group_size: int,
    groups: int,
    batches: int = 1,
    parameters: tuple[float, ...] = (0.0,),
    factor: float = 1.0,
    scale_rewards: Scale = "none",
    energies: bool = False,
) -> Measurement:
    """The same for rules that look at other groups, on batches drawn with a fixed seed; noise is of one group."""
    paths = Paths.of(process, parameters, energies)
    rows = paths.draw(batches * groups, group_size)
    function, options = bind_rule(rule, turn_coef=1.0, scale_rewards=scale_rewards)
    drawn = [
        factor * paths.estimates(function(paths.batch(batch), **options), batch)
        for batch in rows.view(batches, groups, group_size)
    ]
    estimates = drawn[0]
    if batches > 1:
        means = torch.stack([batch.mean(dim=0) for batch in drawn])
        estimates = means.mean(dim=0) + math.sqrt(groups) * (means - means.mean(dim=0))
    weights = torch.full((len(estimates),), 1 / len(estimates), dtype=torch.double)
    return Measurement.of(paths.truth(1.0), estimates, weights)


@dataclass(frozen=True)
class Paths:
    """All trajectories of a process: their probabilities, gradients of their turns' log-probs, and rewards."""

    probability: Tensor  # (M,)
    gradients: Tensor  # (M, K, P)
    rewards: Tensor  # (M, K)
    outcomes: Tensor  # (M,)
    turn_mask: Tensor  # (M, K)
    result_mask: Tensor  # (M, K)
    state_ids: Tensor  # (M, K)
    state_scores: Tensor  # (M, K)
    plays: list[Play]  # of length M

    @classmethod
    def of(cls, process: Process, parameters: tuple[float, ...], energies: bool = False) -> Paths:
        """Plays a process in every way. With `energies` scores are the squared lengths of the turns' gradients."""
        plays, outcomes = [], []
        open_ways: list[tuple[bool, ...]] = [()]
        while open_ways:
            given = open_ways.pop()
            play = Play(given, parameters)
            outcomes.append(process(play))
            if any(play._gradient):
                raise ValueError("A decision after the last turn belongs to no turn: end a turn after it.")
            plays.append(play)
            open_ways += [(*play.taken[:step], False) for step in range(len(given), len(play.taken))]
        shape = (len(plays), max(len(play.turns) for play in plays))
        gradients = torch.zeros(*shape, len(parameters), dtype=torch.double)
        rewards, scores = (torch.full(shape, torch.nan, dtype=torch.double) for _ in range(2))
        exists, results = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
        states = torch.zeros(shape, dtype=torch.long)
        for row, play in enumerate(plays):
            for turn, (gradient, reward, result, state, score) in enumerate(play.turns):
                gradients[row, turn] = torch.tensor(gradient, dtype=torch.double)
                rewards[row, turn] = torch.nan if reward is None else reward
                scores[row, turn] = torch.nan if score is None else score
                if energies:
                    scores[row, turn] = gradients[row, turn].square().sum()
                exists[row, turn], results[row, turn], states[row, turn] = True, result, state
        return cls(
            torch.tensor([play.probability for play in plays], dtype=torch.double),
            gradients,
            rewards,
            torch.tensor([torch.nan if outcome is None else outcome for outcome in outcomes], dtype=torch.double),
            exists,
            results,
            states,
            scores,
            plays,
        )

    def truth(self, turn_coef: float) -> Tensor:
        """The gradient of the expected rewards, shape (P,)."""
        earned = turn_coef * self.rewards.nansum(dim=1) + self.outcomes.nan_to_num(nan=0.0)
        return (self.probability * earned) @ self.gradients.sum(dim=1)

    def estimates(self, advantages: Tensor, rows: Tensor) -> Tensor:
        """The gradient that each group of `rows`, (N, G), estimates with advantages of shape (N * G, K); (N, P)."""
        advantages = advantages.to(torch.double).view(*rows.shape, -1)
        return torch.einsum("ngk,ngkp->np", advantages, self.gradients[rows]) / rows.shape[1]

    def groups(self, group_size: int) -> tuple[Tensor, Tensor]:
        """Every group as rows of its members, (N, G), without regard to order, and its probability, (N,)."""
        chosen = list(itertools.combinations_with_replacement(range(len(self.probability)), group_size))
        members = torch.tensor(chosen)
        ways = torch.tensor([orders(each) for each in chosen], dtype=torch.double)
        return members, self.probability[members].prod(dim=1) * ways

    def draw(self, groups: int, group_size: int, seed: int = 0) -> Tensor:
        """Groups as they are sampled, rows of trajectories of shape (N, G)."""
        draws = torch.Generator().manual_seed(seed)
        rows = torch.multinomial(self.probability, groups * group_size, replacement=True, generator=draws)
        return rows.view(groups, group_size)

    def batch(self, rows: Tensor) -> RewardBatch:
        """The rewards of groups, rows of trajectories of shape (N, G)."""
        flat = rows.flatten()
        return RewardBatch(
            self.rewards[flat],
            self.outcomes[flat],
            self.turn_mask[flat],
            self.result_mask[flat],
            rows.shape[1],
            state_ids=self.state_ids[flat],
            state_scores=self.state_scores[flat],
            turn_streams=self.rewards[flat][None],
            outcome_streams=self.outcomes[flat][None],
            stream_weights=torch.ones(2, dtype=torch.double),
        )


def orders(chosen: tuple[int, ...]) -> int:
    """In how many orders the members of a group can be drawn."""
    repeated = (chosen.count(each) for each in set(chosen))
    return math.factorial(len(chosen)) // math.prod(math.factorial(times) for times in repeated)


def measure_branching(
    rule: Rule,
    process: Process,
    *,
    branch_at: int,
    num_branches: int,
    num_trunks: int = 2,
    parameters: tuple[float, ...] = (0.0,),
    turn_coef: float = 1.0,
) -> Measurement:
    """The same, without scaling, on groups of trunks that end before the first decision of turn `branch_at`."""
    paths = Paths.of(process, parameters)
    families, likely = _families(paths, branch_at, num_branches)
    chosen = list(itertools.combinations_with_replacement(range(len(families)), num_trunks))
    groups = torch.tensor(chosen)
    weights = likely[groups].prod(dim=1) * torch.tensor([orders(each) for each in chosen], dtype=torch.double)
    rows = families[groups].flatten(1)
    function, options = bind_rule(rule, turn_coef=turn_coef, scale_rewards="none")
    batch = replace(paths.batch(rows), num_branches=num_branches, branch_at=branch_at)
    return Measurement.of(paths.truth(turn_coef), paths.estimates(function(batch, **options), rows), weights)


def sampled_turns(process: Process, branch_at: int, num_branches: int, parameters: tuple[float, ...]) -> float:
    """The expected number of turns that are sampled for one trunk and its branches."""
    paths = Paths.of(process, parameters)
    turns = paths.turn_mask.sum(dim=1)
    own = torch.where(torch.tensor([_decides(paths, row, branch_at) for row in range(len(turns))]), num_branches, 1)
    shared = turns.clamp(max=branch_at)
    return (paths.probability @ (shared + own * (turns - shared)).double()).item()


def _families(paths: Paths, branch_at: int, num_branches: int) -> tuple[Tensor, Tensor]:
    """Every trunk with its branches as rows of paths, (F, m), without regard to order, and its probability, (F,)."""
    trunks = defaultdict(list)
    for row, play in enumerate(paths.plays):
        steps = (step for step, turn in play.decisions if turn >= branch_at)
        trunks[tuple(play.taken[: next(steps, None)])].append(row)
    families, likely = [], []
    for rows in trunks.values():
        total = paths.probability[rows].sum()
        if not _decides(paths, rows[0], branch_at):  # it ended sooner
            families.append((rows[0],) * num_branches)
            likely.append(total)
            continue
        for chosen in itertools.combinations_with_replacement(rows, num_branches):
            families.append(chosen)
            likely.append(total * (paths.probability[list(chosen)] / total).prod() * orders(chosen))
    return torch.tensor(families), torch.stack(likely)


def _decides(paths: Paths, row: int, branch_at: int) -> bool:
    """Whether a path has a decision from a turn on."""
    return any(turn >= branch_at for _, turn in paths.plays[row].decisions)
