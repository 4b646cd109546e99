"""From the logs of a study to its statistics, figures, tables and verdicts, with numpy and matplotlib alone.

    python analyze.py logs/cpu                      results.json, report.md, tables.md, tables.tex, figures/
    python analyze.py logs/cpu --suggest            learning rates that would sharpen the brackets most
    python analyze.py --compare logs/cpu logs/mine  are two studies of one grid the same, cell by cell?
    python analyze.py --readme                      puts the results of logs/cpu into README.md

Definitions, fixed before the runs (l: final validation loss, l0: that at step 0, in nats per token):
- A diverged cell, or one with l > l0, counts as l0. l* is the lowest l over the LRs of one arm, depth and
  seed, the optimum its LR; of equal ones, one that did not diverge and has the lowest LR.
- LR sensitivity S: mean over the LRs of l - l* (Wortsman et al., arXiv 2309.14322, section 2.2); on their
  seven LRs alone, both the mean and l* are taken over the seven.
- Maximum stable LR: the largest LR such that it and all from the optimum up to it are stable, which means not
  diverged and l <= l* + delta, 0.5 in the verdicts. One at the grid's edge counts as that edge and is shown
  as ">=".
- D = l(off) - l(on). Necessity LR: where D rises above 0.1 for all larger LRs (last upward crossing), or for
  the first time (first), interpolated in log LR. "never": D is not above 0.1 at the largest LR (last) or at
  any (first). "<=": D is above 0.1 from the lowest LR on (last), or at the lowest LR (first).
- Steps to threshold: first step, interpolated, with validation loss <= l*(off, same depth and seed) + 0.1.
- Every measure is taken per seed; then come the mean, n and the 95 % paired-t interval over seeds. For LRs
  all are taken of the logarithm. The necessity LR of the mean curve is shown beside that mean. The mean over
  depths is formed per seed first, because the depths of one seed share their batches. Where all seeds agree
  on a grid step the interval has no width.
- A mean over fewer seeds than planned says so ("2/3"); where a seed has no number (never, not reached), there
  is no mean. A seed with a missing cell has no measure that needs the whole curve.
- A hypothesis is decided by 95 % intervals of means over depths, and only if no cell is missing.
  H1: mean D over the LRs up to the off arm's best (included), and over those above its maximum stable LR.
  Supported: the first is 0.1 or less, the second above 0.1; contradicted: the second is below 0.1.
  H2: S(off) - S(on), and ln of the maximum stable LR, on - off. Supported: both above 0; contradicted: one
  below it.
  H3: slope of ln necessity LR on ln depth, one fit per seed. Supported: below 0 by both crossings;
  contradicted: above 0 by both; undecided with a "never" or a "<=" among them.
- Seeds of the plan that are not begun count as missing, and are not drawn.
"""
import argparse
import csv
import json
import math
import os
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ARMS = {0: 'off', 1: 'on'}
MARGIN = 0.1  # nats: the difference in loss that counts
DELTAS = (0.25, 0.5, 1.0)  # nats above l* up to which a cell is stable
DELTA = 0.5  # that of the verdicts and figures
STABLE = f'max_stable_{DELTA:g}'
WORTSMAN_LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
EPS = 1e-8  # logs hold nine digits: a smaller difference is rounding, not an answer
GRID_KEYS = ('qknorm', 'n_layer', 'lr', 'seed')
# columns of the log: what they mean, and which extreme over the run is of interest
MECHANISM = {'max_logit': ('max attention logit', max), 'attn_entropy': ('attention entropy (nats)', min),
             'kurtosis': ('activation kurtosis', max), 'log_z': ('log Z of the output', max),
             'sink': ('attention to the first token', max)}
SHOWN = ('max_logit', 'attn_entropy', 'kurtosis')  # those of Fig. 4 and of the README
CELL_VALUES = ('loss', 'perplexity', 'bpb', 'steps', *MECHANISM, *(f'{name}_extreme' for name in MECHANISM))
TIMES_AND_MEMORY = ('seconds', 'wall_s', 'train_s', 'tokens_per_s', 'peak_memory_mb')

# name: label, format, whether it lives on a log scale, what a value that is no number means
MEASURES = {
    'best_lr': ('best LR', '.3g', True, ''),
    'best_loss': ('loss l* at the best LR (nats)', '.3f', False, ''),
    'perplexity': ('perplexity at the best LR', '.2f', False, ''),
    'bpb': ('bits per byte at the best LR', '.3f', False, ''),
    'steps': ('steps to threshold at the best LR', '.0f', False, 'not reached'),
    'sensitivity': ('LR sensitivity S (nats)', '.3f', False, ''),
    'sensitivity_7': ("S on Wortsman's seven LRs (nats)", '.3f', False, 'not in this grid'),
    **{f'max_stable_{d:g}': (f'max stable LR, delta {d:g}', '.3g', True, 'no stable LR') for d in DELTAS},
    **{name: (f'{label}, at the best LR', '.3g', False, '') for name, (label, _) in MECHANISM.items()},
}
PAIR_MEASURES = ('gap', 'gap_low', 'gap_high', 'necessity_last', 'necessity_first')


def bad_input(message):
    """Ends the program with one line on stderr and exit status 2."""
    print('analyze.py: ' + ' '.join(str(message).split()), file=sys.stderr)
    raise SystemExit(2)


# -----------------------------------------------------------------------------
# reading

def read_log(path):
    """One complete log as a dict; raises ValueError with the reason if the file is anything else."""
    if not path.is_file():
        raise ValueError('not a file')
    try:
        text = path.read_bytes().decode('utf-8')
    except UnicodeDecodeError:
        raise ValueError('damaged, or not a log of qkgpt.py: not UTF-8') from None
    if not text:
        raise ValueError('empty')
    if not text.startswith('# {'):
        raise ValueError('not a log of qkgpt.py')
    lines = text.split('\n')
    if lines.pop() != '' or len(lines) < 4 or not lines[-1].startswith('# {'):
        raise ValueError('cut off: no closing line')
    try:
        header, footer = json.loads(lines[0][2:]), json.loads(lines[-1][2:])
        return check_log(path, header, lines[1].split(','), [line.split(',') for line in lines[2:-1]], footer)
    except json.JSONDecodeError as e:
        raise ValueError(f'damaged: header or closing line is not JSON ({e.msg})') from None
    except KeyError as e:
        raise ValueError(f'not a log of qkgpt.py: {e} is missing') from None
    except (TypeError, AttributeError, ArithmeticError, RecursionError):
        raise ValueError('not a log of qkgpt.py: header or closing line has another form') from None


def identity(header):
    """What must agree within a study, as {field: value}: code, data and all settings but the grid's."""
    settings = {k: v for k, v in header['config'].items() if k not in GRID_KEYS}
    data = {f'data {k}': v for k, v in header['data'].items()}
    return {'code': header['code'], **data, **settings}


def origin(header):
    """Where a run comes from, as {field: value}."""
    fields = {key: header.get(key) for key in ('code', 'git', 'processor', 'threads', 'dtype')}
    versions = ', '.join(f'{k} {v}' for k, v in header.get('versions', {}).items())
    return {**fields, 'device': header['config'].get('device'), 'data': header['data'].get('sha256'),
            'versions': versions}


def check_log(path, header, columns, rows, footer):
    """The second half of read_log: the parts agree with each other, and every field is a number."""
    config, diverged = header['config'], footer['status'] == 'diverged'
    if len(set(columns)) < len(columns):
        raise ValueError('damaged: a column stands there twice')
    cell = (int(config['qknorm']), config['n_layer'], float(f"{config['lr']:g}"), config['seed'])
    name = run_name(cell)
    if header['run'] != name or path.name != name + '.csv':
        raise ValueError(f'its header says it is {name}: a copy, or renamed')
    for number, row in enumerate(rows, start=3):
        if len(row) != len(columns):
            raise ValueError(f'damaged: line {number} has {len(row)} fields, not {len(columns)}')
        for column, field in zip(columns, row):
            try:
                float(field or 'nan')
            except ValueError:
                raise ValueError(f'damaged: line {number}, {column} {field!r} is not a number') from None
    rows = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
    steps = [int(s) if s.isdigit() else -1 for s in rows['step']]
    if steps[0] != 0 or any(b <= a for a, b in zip(steps, steps[1:])):
        raise ValueError('damaged: its steps do not increase from 0')
    l0, final = footer['initial_val_loss'], footer['final_val_loss']
    end = footer['diverged_step'] if diverged else config['max_iters']
    if footer['status'] not in ('ok', 'diverged') or steps[-1] != end:
        raise ValueError(f"damaged: {footer['status']!r} at step {end}, but its last row is step {steps[-1]}")
    evals = {s for s in range(end + 1) if s % config['eval_interval'] == 0 or s == config['max_iters']}
    due = evals | {end} | set(range(0, end + 1, config['log_interval']))
    if set(steps) != due:
        raise ValueError(f'damaged: the row of step {min(due ^ set(steps))} is missing or one too many')
    run = {'name': name, 'cell': cell, 'identity': identity(header), 'origin': origin(header),
           'footer': footer, 'config': config, 'rows': rows, 'diverged': diverged, 'l0': l0}
    for column in ('val_loss', 'val_bpb', *MECHANISM):
        if any(s in evals and s != footer['diverged_step'] and not v for s, v in zip(steps, rows[column])):
            raise ValueError(f'damaged: {column} is empty at an evaluation')
    if not diverged and not math.isclose(final, series(run, 'val_loss')[1][-1], rel_tol=1e-6):
        raise ValueError(f"damaged: final_val_loss {final} is not the last row's val_loss")
    if not math.isclose(l0, series(run, 'val_loss')[1][0], rel_tol=1e-6):
        raise ValueError(f"damaged: initial_val_loss {l0} is not the first row's val_loss")
    run['loss'] = l0 if diverged else min(final, l0)
    return run


def series(run, column):
    """Steps and values of the rows in which a column was measured and finite, as two arrays."""
    pairs = [(int(s), float(v)) for s, v in zip(run['rows']['step'], run['rows'][column]) if v]
    pairs = [pair for pair in pairs if math.isfinite(pair[1])]
    return np.array(pairs).reshape(-1, 2).T


def read_plan(path):
    """plan.txt as {key: text}; one line and exit 2 if the grid in it cannot be read."""
    lines = [line.strip() for line in path.read_text(encoding='utf-8', errors='replace').splitlines()]
    plan = dict(line.partition(' ')[::2] for line in lines if line and not line.startswith('#'))
    for key, number, top in (('lrs', float, 1e20), ('depths', int, 2**20), ('seeds', int, 2**63)):
        try:
            values = sorted({number(v) for v in plan[key].split()})
        except (KeyError, ValueError):
            values = []
        if not values or not all(0 < v <= top or v == 0 and key == 'seeds' for v in values):
            bad_input(f"{path}: {key} {plan.get(key, '')!r} should be numbers above 0, at most {top:g}")
        plan[key] = values
    return plan


def run_name(cell):
    return 'L{1}_lr{2:g}_qk{0}_s{3}'.format(*cell)


def read_study(folder, allow_mixed=False):
    """All complete logs of a folder against the grid of its plan.txt; without one, the grid they span."""
    folder = Path(folder)
    if not folder.is_dir():
        bad_input(f'{folder} is not a folder; a study is a folder of logs, such as logs/cpu')
    runs, left_out = {}, {p.name: 'unfinished' for p in sorted(folder.glob('*.partial'))}
    for path in sorted(folder.glob('*.csv')):
        try:
            run = read_log(path)
            runs[run['cell']] = run
        except (ValueError, OSError) as e:
            left_out[path.name] = getattr(e, 'strerror', None) or str(e)
    plan_file = folder / 'plan.txt'
    plan = read_plan(plan_file) if plan_file.exists() else {}
    _, depths, lrs, seeds = (sorted(set(values)) for values in zip(*runs)) if runs else [[]] * 4
    study = SimpleNamespace(name=folder.absolute().name, folder=folder, planned=bool(plan), left_out=left_out,
                            lrs=plan.get('lrs', lrs), depths=plan.get('depths', depths),
                            seeds=plan.get('seeds', seeds))
    for cell in sorted(set(runs) - set(grid_of(study))):
        left_out[runs.pop(cell)['name'] + '.csv'] = 'not in the grid of plan.txt'
    if not runs:
        names = ', '.join(f'{name}: {why}' for name, why in list(left_out.items())[:3])
        bad_input(f'{folder} holds no finished log of qkgpt.py' + (f' ({names})' if names else ''))
    fill(study, runs)
    study.mixed = mixture(study, plan)
    if study.mixed and not allow_mixed:
        bad_input(f'{folder} mixes logs: {study.mixed}; --allow-mixed analyses them together')
    return study


def grid_of(study):
    return [(arm, depth, lr, seed) for seed in study.seeds for depth in study.depths
            for lr in study.lrs for arm in ARMS]


def fill(study, runs):
    """Sets what there is and what lacks of the study's grid, in one order, whatever the file system's."""
    study.runs = {cell: runs[cell] for cell in grid_of(study) if cell in runs}
    study.missing = [cell for cell in grid_of(study) if cell not in runs]
    study.begun = [seed for seed in study.seeds if any(cell[3] == seed for cell in runs)]
    study.gaps = [cell for cell in study.missing if cell[3] in study.begun]  # what figures mark as missing


def mixture(study, plan):
    """Names the fields in which the logs differ, with how many of each; empty if they agree."""
    voices = [run['identity'] for run in study.runs.values()]
    wanted = {'code': plan.get('code'), 'data sha256': plan.get('data')}
    parts = []
    for field in sorted(set().union(*voices)):
        count = Counter(str(voice.get(field))[:12] for voice in voices)
        text = ', '.join(f'{value} in {n}' for value, n in sorted(count.items()))
        planned = str(wanted.get(field) or '')[:12]
        if len(count) > 1 or planned and planned not in count:
            parts.append(f'{field} {text}' + (f' (plan.txt: {planned})' if planned else ''))
    return '; '.join(parts)


# -----------------------------------------------------------------------------
# statistics and measures

def t_quantile(df, level=0.95):
    """t with P(|T| <= t) = level, from the closed form for integer df (Abramowitz & Stegun 26.7.3-4)."""
    def probability(theta):  # theta = atan(t / sqrt(df))
        term = math.cos(theta) if df % 2 else 1.0
        total = 0.0
        for k in range(3 if df % 2 else 2, df + 1, 2):
            total += term
            term *= (k - 1) / k * math.cos(theta) ** 2
        total *= math.sin(theta)
        return 2 / math.pi * (theta + total) if df % 2 else total
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return math.sqrt(df) * math.tan(low)


def summary(values):
    """Mean and 95 % t interval over seeds. None is a missing cell and lowers n; a value that is not finite is
    an answer without a number ("never"): it is counted in `open`, and then there is no mean."""
    seen = [v for v in values if v is not None]
    result = {'mean': None, 'lo': None, 'hi': None, 'n': len(seen), 'of': len(values),
              'open': sum(not math.isfinite(v) for v in seen)}
    if seen and not result['open']:
        result['mean'] = sum(seen) / len(seen)
        if len(seen) > 1:
            half = t_quantile(len(seen) - 1) * np.std(seen, ddof=1) / math.sqrt(len(seen))
            result.update(lo=result['mean'] - half, hi=result['mean'] + half)
    return result


def logs(values):
    """Natural logarithms; 0 stands for "below the grid" and becomes -inf, None stays None, nan stays nan."""
    return [None if v is None else -math.inf if v == 0 else math.log(v) for v in values]


def exp_summary(s):
    """A summary of logarithms as a geometric mean (or ratio) with its interval."""
    return {k: math.exp(v) if k in ('mean', 'lo', 'hi') and v is not None else v for k, v in s.items()}


def subtract(a, b):
    """Pairwise a - b over seeds; None where a cell of the pair is missing."""
    return [None if x is None or y is None else x - y for x, y in zip(a, b)]


def compared(off, on, log=False):
    """Summaries of both arms and of their paired difference; with `log` geometric means and the ratio."""
    if log:
        off, on = logs(off), logs(on)
    found = {'off': summary(off), 'on': summary(on)}
    found['on / off' if log else 'on - off'] = summary(subtract(on, off))
    return {name: exp_summary(s) if log else s for name, s in found.items()}


def over_depths(values):
    """{depth: [one value a seed]} as a summary per depth, and that of the per-seed mean over depths."""
    means = [None if None in row else sum(row) / len(row) for row in zip(*values.values())]
    return {'by_depth': {depth: summary(v) for depth, v in values.items()}, 'mean': summary(means)}


def optimum(loss, diverged):
    """Index of the lowest loss; of equal ones a cell that did not diverge, then the lowest LR."""
    return min(range(len(loss)), key=lambda i: (loss[i], diverged[i], i))


def lr_sensitivity(loss):
    """Mean excess over the best of one arm's losses, already clipped at l0 (nats)."""
    best = min(loss)
    return sum(l - best for l in loss) / len(loss)


def max_stable(loss, diverged, delta):
    """Index of the maximum stable LR, -1 if even the optimum diverged."""
    best, top = optimum(loss, diverged), -1
    for i in range(best, len(loss)):
        if diverged[i] or loss[i] > loss[best] + delta + EPS:
            break
        top = i
    return top


def necessity(lrs, gap):
    """(last, first) upward crossing of gap = l(off) - l(on) through MARGIN, as LRs (inf: never, 0: below)."""
    above = [g > MARGIN + EPS for g in gap]
    rises = [i for i in range(len(gap)) if above[i] and (i == 0 or not above[i - 1])]

    def locate(i):
        if i == 0:
            return 0.0
        share = (MARGIN - gap[i - 1]) / (gap[i] - gap[i - 1])
        return lrs[i - 1] * (lrs[i] / lrs[i - 1]) ** share
    return locate(rises[-1]) if above[-1] else math.inf, locate(rises[0]) if rises else math.inf


def steps_to(run, threshold):
    """First step with validation loss <= threshold, linear between evaluations; inf: not reached."""
    steps, loss = series(run, 'val_loss')
    for i in range(len(loss)):
        if loss[i] <= threshold:
            share = (loss[i - 1] - threshold) / (loss[i - 1] - loss[i]) if i else 1.0
            return float(steps[i - 1] + share * (steps[i] - steps[i - 1]) if i else steps[0])
    return math.inf


def cell_values(run, threshold):
    """What is reported of a run; mechanisms at the last evaluation, and their finite extremes."""
    bpb = series(run, 'val_bpb')[1][0] / series(run, 'val_loss')[1][0] * run['loss']  # bits per byte of a nat
    values = {'loss': run['loss'], 'perplexity': math.exp(run['loss']), 'bpb': bpb, 'l0': run['l0'],
              'steps': None if threshold is None else steps_to(run, threshold)}
    for column, (_, extreme) in MECHANISM.items():
        measured = series(run, column)[1]
        values[column], values[column + '_extreme'] = float(measured[-1]), float(extreme(measured))
    return values


def measure_arm(lrs, runs, values):
    """All of MEASURES for one arm, depth and seed, from its runs in order of LR and their cell_values."""
    loss, diverged = [run['loss'] for run in runs], [run['diverged'] for run in runs]
    best = optimum(loss, diverged)
    seven = [l for lr, l in zip(lrs, loss) if lr in WORTSMAN_LRS]
    result = {name: values[best][name] for name in ('perplexity', 'bpb', 'steps', *MECHANISM)}
    result.update(best_lr=lrs[best], best_loss=loss[best], sensitivity=lr_sensitivity(loss),
                  sensitivity_7=lr_sensitivity(seven) if len(seven) == len(WORTSMAN_LRS) else math.nan)
    for delta in DELTAS:
        top = max_stable(loss, diverged, delta)
        result[f'max_stable_{delta:g}'] = lrs[top] if top >= 0 else math.nan
    return result


def measure_pair(lrs, off, on):
    """All of PAIR_MEASURES for one depth and seed, from the runs of both arms in order of LR."""
    loss, diverged = [run['loss'] for run in off], [run['diverged'] for run in off]
    gap = [a - b['loss'] for a, b in zip(loss, on)]
    low, high = gap[:optimum(loss, diverged) + 1], gap[max_stable(loss, diverged, DELTA) + 1:]
    last, first = necessity(lrs, gap)
    return {'gap': gap, 'gap_low': sum(low) / len(low),
            'gap_high': sum(high) / len(high) if high else math.nan,
            'necessity_last': last, 'necessity_first': first}


def measure_seed(study, depth, seed):
    """({arm: MEASURES}, PAIR_MEASURES) of one depth and seed, None where a cell lacks; fills study.values."""
    curves = {arm: [study.runs.get((arm, depth, lr, seed)) for lr in study.lrs] for arm in ARMS}
    whole = {arm: None not in runs for arm, runs in curves.items()}
    threshold = min(run['loss'] for run in curves[0]) + MARGIN if whole[0] else None
    arms = {}
    for arm, runs in curves.items():
        values = [run and cell_values(run, threshold) for run in runs]
        study.values.update((run['cell'], v) for run, v in zip(runs, values) if run)
        arms[arm] = measure_arm(study.lrs, runs, values) if whole[arm] else dict.fromkeys(MEASURES)
    pair = measure_pair(study.lrs, *curves.values()) if all(whole.values()) else dict.fromkeys(PAIR_MEASURES)
    return arms, pair


def measure(study):
    """Adds to the study values[cell] and, one value a seed, arms[name][depth][arm] and pairs[name][depth]."""
    study.values = {}
    found = {depth: [measure_seed(study, depth, seed) for seed in study.seeds] for depth in study.depths}
    study.arms = {name: {depth: {arm: [arms[arm][name] for arms, _ in seeds] for arm in ARMS}
                         for depth, seeds in found.items()} for name in MEASURES}
    study.pairs = {name: {depth: [pair[name] for _, pair in seeds] for depth, seeds in found.items()}
                   for name in PAIR_MEASURES}
    return study


def mean_necessity(study, depth):
    """(last, first) crossing of the gap's mean over seeds; None while a cell is missing."""
    gaps = study.pairs['gap'][depth]
    return (None, None) if None in gaps else necessity(study.lrs, np.mean(gaps, axis=0).tolist())


# -----------------------------------------------------------------------------
# verdicts

def is_above(s, bound):
    return s['lo'] is not None and s['lo'] > bound + EPS


def is_below(s, bound):
    return s['hi'] is not None and s['hi'] < bound - EPS


def span(s, fmt='.3f'):
    """mean [low, high] as text."""
    if s['mean'] is None:
        return 'not available'
    if s['lo'] is None:
        return f"{s['mean']:{fmt}}"
    return f"{s['mean']:{fmt}} [{s['lo']:{fmt}}, {s['hi']:{fmt}}]"


def depth_text(q, fmt='.3f', change=lambda s: s):
    """The mean over depths with its n, then each depth that has one; n/of where seeds are missing."""
    each = [f'depth {depth}: {span(change(s), fmt)}'
            + (f" ({s['n']}/{s['of']})" if s['n'] != q['mean']['n'] else '')
            for depth, s in q['by_depth'].items() if s['mean'] is not None]
    n = f"n = {q['mean']['n']}" + (f"/{q['mean']['of']}" if q['mean']['n'] < q['mean']['of'] else '')
    return f"{span(change(q['mean']), fmt)} ({'; '.join([n, *each])})"


def obstacles(study):
    """Reasons why no hypothesis of this study can be decided."""
    reasons = []
    if len(study.seeds) < 2:
        reasons.append('one seed gives no interval')
    if study.missing:
        total = len(study.runs) + len(study.missing)
        reasons.append(f'{len(study.missing)} of {total} cells are missing')
    return reasons


def where_open(study, values, words):
    """Names depths and seeds whose value is not a number; `words` says for a value what that means."""
    found = {}
    for depth, row in values.items():
        for seed, v in zip(study.seeds, row):
            if v is not None and not math.isfinite(v):
                found.setdefault(words(v), {}).setdefault(depth, []).append(str(seed))
    places = {text: [f"depth {depth} (seed {', '.join(seeds)})" for depth, seeds in depths.items()]
              for text, depths in found.items()}
    return [f"{text} at {', '.join(where)}" for text, where in places.items()]


def conclude(name, claim, supported, contradicted, reasons, unclear, numbers, text):
    """One verdict with its paragraph. `reasons` forbid a decision; `unclear` is why if neither side holds."""
    verdict = 'undecided'
    if not reasons:
        verdict = 'supported' if supported else 'contradicted' if contradicted else 'undecided'
    why = '; '.join(reasons or ([] if supported or contradicted else unclear))
    head = f'{name} ({claim}): {verdict}' + (f', because {why}' if why else '')
    return {'verdict': verdict, 'why': why, 'text': f'{head}. {text}', 'numbers': numbers}


def verdict_h1(study):
    low, high = over_depths(study.pairs['gap_low']), over_depths(study.pairs['gap_high'])
    reasons = obstacles(study)
    reasons += where_open(study, study.pairs['gap_high'], lambda v: 'the off arm is stable to the edge')
    high_ok, high_fails = is_above(high['mean'], MARGIN), is_below(high['mean'], MARGIN)
    low_ok = low['mean']['hi'] is not None and low['mean']['hi'] <= MARGIN + EPS
    unclear = [] if low_ok else [f'the first mean is not shown to be {MARGIN} nats or less']
    if not high_ok:
        unclear.append(f'the interval of the second holds {MARGIN}')
    text = (f'With D = l(off) - l(on) in nats, 95 % intervals over seeds: D averages {depth_text(low)} over '
            f"the LRs up to the off arm's best, and {depth_text(high)} over those above its max stable LR.")
    return conclude('H1', 'no effect at low LR, decisive at high LR', low_ok and high_ok, high_fails, reasons,
                    unclear, {"D up to off's best LR": low, "D above off's max stable LR": high}, text)


def verdict_h2(study):
    sens, stable = study.arms['sensitivity'], study.arms[STABLE]
    s_gain = over_depths({d: subtract(sens[d][0], sens[d][1]) for d in study.depths})
    lr_gain = over_depths({d: subtract(logs(stable[d][1]), logs(stable[d][0])) for d in study.depths})
    reasons = obstacles(study)
    for arm in ARMS:
        tops = {d: logs(stable[d][arm]) for d in study.depths}
        reasons += where_open(study, tops, lambda v: f'no LR of the {ARMS[arm]} arm is stable')
    gains = {'sensitivity': s_gain['mean'], 'maximum stable LR': lr_gain['mean']}
    unclear = [f'the interval of the {what} holds 0' for what, s in gains.items() if not is_above(s, 0)]
    text = (f'S(off) - S(on) is {depth_text(s_gain)} nats; the maximum stable LR with QK-norm is '
            f"{depth_text(lr_gain, '.3g', exp_summary)} times that without.")
    edge = [f'{name} at depth {d}' for d in study.depths for arm, name in ARMS.items()
            if study.lrs[-1] in stable[d][arm]]
    if edge:
        text += f" A maximum at the grid's edge counts as that edge ({', '.join(edge)})."
    return conclude('H2', 'a larger maximum stable LR and a lower LR sensitivity',
                    all(is_above(s, 0) for s in gains.values()), any(is_below(s, 0) for s in gains.values()),
                    reasons, unclear,
                    {'S(off) - S(on)': s_gain, 'ln max stable LR, on - off': lr_gain}, text)


def seed_fits(study, name):
    """Per seed least-squares (slope, intercept) of log necessity LR on log depth; None if one is lacking."""
    x = np.log(study.depths)
    fits = []
    for row in zip(*(logs(study.pairs[name][d]) for d in study.depths)):
        whole = len(row) > 1 and all(v is not None and math.isfinite(v) for v in row)
        fits.append(tuple(np.polyfit(x, row, 1).tolist()) if whole else None)
    return fits


def verdict_h3(study):
    reasons, slopes, numbers, parts = obstacles(study), {}, {}, []
    if len(study.depths) < 2:
        reasons.append('one depth gives no trend')
    for kind in ('last', 'first'):
        name = 'necessity_' + kind
        values = {d: logs(v) for d, v in study.pairs[name].items()}
        reasons += where_open(study, values, lambda v: f'the {kind} crossing is '
                              + ("'never'" if v > 0 else 'below the grid'))
        slope = summary([fit and fit[0] for fit in seed_fits(study, name)])
        each = '; '.join(f"depth {d}: {measure_text(study, v, '.3g', True, 'never')}"
                         for d, v in values.items())
        parts.append(f"{span(slope)} by the {kind} upward crossing (n = {slope['n']}; necessity LR: {each})")
        numbers[f'slope of ln necessity LR on ln depth, {kind} crossing'] = {
            'mean': slope, 'necessity_lr_by_depth': {d: exp_summary(summary(v)) for d, v in values.items()}}
        slopes[kind] = slope
    falls, rises = ({kind: test(s, 0) for kind, s in slopes.items()} for test in (is_below, is_above))
    agree = falls['last'] == falls['first'] and rises['last'] == rises['first']
    unclear = ['the interval of the slope holds 0' if agree else 'the two crossings do not agree']
    text = 'The slope of log necessity LR on log depth is ' + ', and '.join(parts) + '.'
    return conclude('H3', 'the necessity LR falls with depth', all(falls.values()), all(rises.values()),
                    reasons, unclear, numbers, text)


# -----------------------------------------------------------------------------
# results, tables, report

def measure_text(study, values, fmt, log, words):
    """One entry of a table: the mean, n/of where seeds are missing, or how many have no number."""
    s = summary(values)
    if not s['n']:
        return 'missing'
    tail = f" ({s['n']}/{s['of']})" if s['n'] < s['of'] else ''
    if s['open']:
        kinds = Counter(f'<= {study.lrs[0]:g}' if v == -math.inf else words
                        for v in values if v is not None and not math.isfinite(v))
        return ', '.join(f"{kind} in {k} of {s['n']}" for kind, k in sorted(kinds.items())) + tail
    return f"{(exp_summary(s) if log else s)['mean']:{fmt}}" + tail


def stable_text(study, values):
    """The maximum stable LR as its bracket, ends averaged geometrically; ">=" if a seed is at the edge."""
    text = measure_text(study, logs(values), *MEASURES[STABLE][1:])
    if summary(values)['open']:
        return text
    if study.lrs[-1] in values:
        return '>= ' + text
    after = [study.lrs[study.lrs.index(v) + 1] for v in values if v in study.lrs]
    return f"{text} to {math.exp(summary(logs(after))['mean']):.3g}" if after else text


def measure_table(study):
    header = ['measure', 'depth', 'off', 'on', 'on - off [95 %]', 'n']
    rows = []
    for name, (label, fmt, log, words) in MEASURES.items():
        for depth, arms in study.arms[name].items():
            if name.startswith('max_stable'):
                entries = [stable_text(study, v) for v in arms.values()]
            else:
                entries = [measure_text(study, logs(v) if log else v, fmt, log, words) for v in arms.values()]
            gap = list(compared(*arms.values(), log).values())[-1]
            text = ('ratio ' if log and gap['mean'] else '') + span(gap, '.3g' if log else fmt)
            rows.append([label, str(depth), *entries, text, f"{gap['n']}/{gap['of']}"])
    for i, kind in enumerate(('last', 'first')):
        for depth, values in study.pairs['necessity_' + kind].items():
            s = exp_summary(summary(logs(values)))
            text = span(s, '.3g') if s['mean'] else measure_text(study, logs(values), '.3g', True, 'never')
            text += f'; of the mean curve: {lr_text(study, mean_necessity(study, depth)[i])}'
            rows.append([f'necessity LR, {kind} crossing', str(depth), '', '', text, f"{s['n']}/{s['of']}"])
    return 'Measures per depth and arm, means over seeds, paired 95 % t intervals over seeds', header, rows


def lr_text(study, lr):
    """A necessity LR in words where it is no number."""
    return {None: 'missing', math.inf: 'never', 0: f'<= {study.lrs[0]:g}'}.get(lr) or f'{lr:.4g}'


def loss_table(study):
    header = ['LR', *(f'depth {depth} {name}' for depth in study.depths for name in ARMS.values())]
    rows = []
    for lr in study.lrs:
        row = [f'{lr:g}']
        for depth in study.depths:
            for arm in ARMS:
                runs = [study.runs.get((arm, depth, lr, seed)) for seed in study.seeds]
                text = measure_text(study, [r and r['loss'] for r in runs], '.3f', False, '')
                d = sum(r['diverged'] for r in runs if r)
                row.append(text + (f', {d} of {len(runs) - runs.count(None)} div.' if d else ''))
        rows.append(row)
    return ('Final validation loss in nats at every LR, means over seeds; a run that diverged (d of n div.) '
            'or ended above l0 counts as l0; (n/N) where cells are missing', header, rows)


def mechanism_table(study):
    header = ['LR', *(f'{MECHANISM[name][0]}, {arm}' for name in SHOWN for arm in ARMS.values())]
    rows = []
    for lr in study.lrs:
        row = [f'{lr:g}']
        for name in SHOWN:
            for arm in ARMS:
                seen = [v[name] for cell, v in study.values.items() if (cell[0], cell[2]) == (arm, lr)]
                seen = [v for v in seen if math.isfinite(v)]
                row.append(f'{np.median(seen):.3g}' if seen else 'missing')
        rows.append(row)
    return 'The mechanism at the last evaluation, medians over depths and seeds', header, rows


def mechanism_text(study):
    """The lowest, middle and highest LR of mechanism_table as a sentence."""
    caption, _, rows = mechanism_table(study)
    rows = [rows[i] for i in sorted({0, len(rows) // 2, len(rows) - 1})]
    parts = []
    for i, name in enumerate(SHOWN):
        pairs = [f'{row[2 * i + 1]} / {row[2 * i + 2]} at LR {row[0]}' for row in rows]
        parts.append(f"{MECHANISM[name][0]} {', '.join(pairs)}")
    return f"{caption}, off / on: {'; '.join(parts)}."


def verdict_table(verdicts):
    header = ['hypothesis', 'mean over depths, or trend', 'value [95 %]', 'n', 'verdict']
    rows = [[name, quantity, span(q['mean']), f"{q['mean']['n']}/{q['mean']['of']}", verdict['verdict']]
            for name, verdict in verdicts.items() for quantity, q in verdict['numbers'].items()]
    return 'The hypotheses: what decides them, with 95 % t intervals over seeds', header, rows


def coverage_table(study):
    header = ['depth', 'arm', *(f'{lr:g}' for lr in study.lrs)]
    rows = []
    for depth in study.depths:
        for arm, name in ARMS.items():
            row = [str(depth), name]
            for lr in study.lrs:
                runs = [study.runs[c] for c in study.runs if c[:3] == (arm, depth, lr)]
                d = sum(r['diverged'] for r in runs)
                row.append(f'{len(runs)}/{len(study.seeds)}' + (f' {d}d' if d else ''))
            rows.append(row)
    return 'Finished cells, of planned seeds, at each LR (d: diverged, counted as l0)', header, rows


def markdown(caption, header, rows):
    lines = ['| ' + ' | '.join(cells) + ' |' for cells in (header, ['---'] * len(header), *rows)]
    return f'**{caption}.**\n\n' + '\n'.join(lines) + '\n'


def latex(caption, header, rows):
    """A booktabs table."""
    def escape(text):
        text = re.sub(r'([%&_#])', r'\\\1', text)
        text = text.replace('>=', r'$\geq$').replace('<=', r'$\leq$').replace(' - ', ' $-$ ')
        return re.sub(r'(?<![\w.])-(?=[\d.])', '$-$', text)
    body = [' & '.join(map(escape, row)) + r' \\' for row in (header, *rows)]
    return '\n'.join([r'\begin{table*}', r'\centering', rf'\caption{{{escape(caption)}.}}',
                      rf"\begin{{tabular}}{{{'l' * len(header)}}}", r'\toprule', body[0], r'\midrule',
                      *body[1:], r'\bottomrule', r'\end{tabular}', r'\end{table*}', ''])


def coverage_text(study):
    counts = []
    for arm, name in ARMS.items():
        runs = [run for cell, run in study.runs.items() if cell[0] == arm]
        counts.append(f"{sum(run['diverged'] for run in runs)} of {len(runs)} {name}")
    depths, seeds = (' '.join(map(str, values)) for values in (study.depths, study.seeds))
    text = (f'Study {study.name}: {len(study.runs)} of {len(study.runs) + len(study.missing)} cells finished '
            f'({len(study.lrs)} LRs x depths {depths} x seeds {seeds} x off, on); '
            f"diverged: {', '.join(counts)}.")
    if not study.planned:
        text += ' There is no plan.txt: the grid is the one the logs span, so one never begun goes unnoticed.'
    steps = np.exp(np.diff(np.log(study.lrs)))
    if len(steps) and math.log(max(steps)) > 1.5 * math.log(min(steps)):
        text += (f' The grid is not uniform in log LR (steps x{min(steps):.2f} to x{max(steps):.2f}): '
                 'S weighs its dense part more.')
    if study.mixed:
        text += f' Mixed logs were allowed: {study.mixed}.'
    return text


def provenance(study):
    """Where the numbers come from, with the count of runs of each value."""
    seen = {}
    for run in study.runs.values():
        for key, value in run['origin'].items():
            seen.setdefault(key, Counter())[str(value)] += 1
    return {key: dict(sorted(count.items())) for key, count in seen.items()}


def results_of(study):
    """Everything that is reported, for results.json."""
    measures, by_lr = {}, {}
    for name, (_, _, log, words) in MEASURES.items():
        measures[name] = {depth: compared(*arms.values(), log) for depth, arms in study.arms[name].items()}
        for depth, arms in study.arms[name].items():
            for arm, values in arms.items():
                per_seed = [v if v is None or math.isfinite(v) else words for v in values]
                measures[name][depth][ARMS[arm]]['per_seed'] = per_seed
    for kind in ('last', 'first'):
        measures['necessity_' + kind] = {
            depth: {**exp_summary(summary(logs(values))), 'per_seed': [lr_text(study, v) for v in values]}
            for depth, values in study.pairs['necessity_' + kind].items()}
    for depth in study.depths:
        by_lr[depth] = {f'{lr:g}': {} for lr in study.lrs}
        for lr in study.lrs:
            for name in CELL_VALUES:
                off, on = ([study.values.get((arm, depth, lr, seed), {}).get(name) for seed in study.seeds]
                           for arm in ARMS)
                by_lr[depth][f'{lr:g}'][name] = compared(off, on)
    cells = {run['name']: {'diverged': run['diverged'], **study.values[cell]}
             for cell, run in study.runs.items()}
    return {'study': study.name, 'coverage': coverage_text(study), 'left_out': study.left_out,
            'grid': {'lrs': study.lrs, 'depths': study.depths, 'seeds': study.seeds},
            'missing': [run_name(cell) for cell in study.missing], 'verdicts': study.verdicts,
            'measures': measures,
            'necessity_of_mean_curve': {depth: [lr_text(study, lr) for lr in mean_necessity(study, depth)]
                                        for depth in study.depths},
            'by_lr': by_lr, 'cells': cells, 'provenance': provenance(study)}


def plain(value):
    """A value as JSON knows it: keys as text, nine digits, "inf" and "nan" as words (inf: not reached)."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return float(f'{value:.9g}') if math.isfinite(value) else str(float(value))
    return value


def tables(study):
    return verdict_table(study.verdicts), measure_table(study), loss_table(study), mechanism_table(study)


def section(study):
    """The results in Markdown, for tables.md and report.md."""
    return coverage_text(study) + '\n\n' + '\n'.join(markdown(*t) for t in tables(study))


def report(study):
    parts = [f'# {study.name}', coverage_text(study), *(v['text'] for v in study.verdicts.values()),
             markdown(*coverage_table(study))]
    if study.left_out:
        parts.append('Left out:\n\n' + '\n'.join(f'- {name}: {why}' for name, why in study.left_out.items()))
    origins = [f'- {key}: ' + '; '.join(f'{value} ({n})' for value, n in count.items())
               for key, count in provenance(study).items()]
    parts.append('Runs:\n\n' + '\n'.join(origins))
    return '\n\n'.join(parts) + '\n\n' + section(study).partition('\n\n')[2]


def judge(study):
    """Adds measures and verdicts to a study that was read."""
    measure(study)
    study.verdicts = {'H1': verdict_h1(study), 'H2': verdict_h2(study), 'H3': verdict_h3(study)}
    return study


def analyze(folder, allow_mixed=False):
    return judge(read_study(folder, allow_mixed))


def variant_rows(study, variant):
    """Two rows of numbers: of the study cut down to the variant's grid, and of the variant."""
    grid = {key: getattr(variant, key) for key in ('lrs', 'depths', 'seeds')}
    cut = SimpleNamespace(**{**vars(study), **grid})
    fill(cut, study.runs)
    settings = [next(iter(s.runs.values()))['identity'] for s in (study, variant)]
    changes = [f'{key} {settings[0].get(key)}, here {value}' for key, value in settings[1].items()
               if value != settings[0].get(key)]
    rows = []
    for s, words in ((judge(cut), 'on the same grid'), (variant, '; '.join(changes))):
        h1, h2 = s.verdicts['H1']['numbers'], s.verdicts['H2']['numbers']
        *gaps, gain, ratio = (q['mean'] for q in (*h1.values(), *h2.values()))
        rows.append([s.name, words, *map(span, (*gaps, gain)), span(exp_summary(ratio), '.3g'),
                     f"{gain['n']}/{gain['of']}"])
    return rows


def variant_table(study):
    """The table of the studies named <study>-..., each beside the study itself on the same grid."""
    folders = sorted(study.folder.absolute().parent.glob(f'{study.name}-*/'))
    variants = [analyze(folder) for folder in folders if any(folder.glob('*.csv'))]
    header = ['study', 'setting', "D up to off's best LR", "D above off's max stable LR", 'S(off) - S(on)',
              'max stable LR, on / off', 'n']
    grids = [f"{v.name}: LRs {' '.join(f'{lr:g}' for lr in v.lrs)}, depth {' '.join(map(str, v.depths))}"
             for v in variants]
    rows, above = [], None
    for variant in variants:
        same_grid, row = variant_rows(study, variant)
        rows += [row] if same_grid == above else [same_grid, row]
        above = same_grid
    return f"Other settings ({'; '.join(grids)}), means with 95 % t intervals over seeds", header, rows


# -----------------------------------------------------------------------------
# figures: off is dashed and open, on is solid and filled, so that grey print keeps them apart

COLUMN, PAGE = 3.5, 7.16  # inches: the widths of an IEEE column and page
DASHED = (0, (3.5, 1.5))
ARM_STYLES = {  # Okabe and Ito's vermillion and blue; off is drawn over on, which shows through
    0: {'color': '#D55E00', 'ls': DASHED, 'marker': 'o', 'ms': 3.0, 'mfc': 'white', 'mew': 0.8, 'zorder': 4},
    1: {'color': '#0072B2', 'ls': '-', 'marker': 's', 'ms': 3.6, 'mfc': '#0072B2', 'mew': 0.8, 'zorder': 3}}
NECESSITY_STYLES = {  # bluish green and reddish purple
    'last': {'color': '#009E73', 'ls': '-', 'marker': 'D', 'ms': 3.2, 'mfc': '#009E73', 'zorder': 4},
    'first': {'color': '#CC79A7', 'ls': DASHED, 'marker': 'o', 'ms': 3.4, 'mfc': 'white', 'zorder': 3}}
GUIDE = {'color': '0.35', 'ls': ':', 'lw': 0.9}
EVENT = {'color': '0.3', 'ls': '', 'mfc': 'white', 'mew': 0.7, 'ms': 3.6}


def setup_matplotlib():
    """matplotlib with its own defaults and its own fonts, whatever the machine has configured."""
    for name in ('MPLBACKEND', 'SOURCE_DATE_EPOCH'):  # of no use here: no display, no dates
        os.environ.pop(name, None)  # and a wrong value would end in a traceback
    import matplotlib
    from matplotlib import font_manager
    fonts = font_manager.fontManager
    fonts.ttflist = [f for f in fonts.ttflist if f.fname.startswith(matplotlib.get_data_path())]
    matplotlib.rcdefaults()
    texts = ('font.size', 'axes.labelsize', 'axes.titlesize', 'xtick.labelsize', 'ytick.labelsize',
             'legend.fontsize')
    ticks = {f'{axis}tick.{key}': v for axis in 'xy' for key, v in (
        ('major.width', 0.6), ('minor.width', 0.4), ('major.size', 3), ('minor.size', 1.6))}
    matplotlib.rcParams.update({
        **dict.fromkeys(texts, 8), **ticks, 'font.family': 'STIXGeneral', 'mathtext.fontset': 'stix',
        'pdf.fonttype': 42, 'savefig.dpi': 300, 'figure.constrained_layout.use': True, 'lines.linewidth': 1.1,
        'legend.frameon': False, 'legend.handlelength': 2.4, 'legend.columnspacing': 1.6,
        'axes.linewidth': 0.6, 'axes.spines.top': False, 'axes.spines.right': False,
        'axes.titlelocation': 'left', 'axes.titlepad': 4})


def new_figure(width, height, rows, columns, **shared):
    from matplotlib.figure import Figure
    fig = Figure(figsize=(width, height))
    return fig, fig.subplots(rows, columns, squeeze=False, **shared)


def legend(fig, entries, columns=None):
    """A legend above the panels, from {label: style}."""
    from matplotlib.lines import Line2D
    handles = [Line2D([], [], label=label, **style) for label, style in entries.items()]
    fig.legend(handles=handles, loc='outside upper center', ncols=columns or len(handles), borderaxespad=0.2)


def legend_entries(study, diverged='diverged run', **line):
    """{label: style} of the arms, and of the marks for diverged and missing runs if there are any."""
    entries = {f'QK-norm {name}': {**ARM_STYLES[arm], **line} for arm, name in ARMS.items()}
    if diverged and any(run['diverged'] for run in study.runs.values()):
        entries[diverged] = {**EVENT, 'marker': '^'}
    if study.gaps:
        entries['missing run'] = {**EVENT, 'marker': 'X'}
    return entries


def stack(ax, x, y, count, style, marker, aside=0.0, down=False):
    """One marker a run, stacked upward from (x, y); without y from the axis' lower end, or `down` from its
    upper end. `aside` moves it by so many points. A stack leaves the scale of y: its height is a count."""
    from matplotlib.transforms import ScaledTranslation
    base = ax.get_xaxis_transform() if y is None else ax.transData
    for i in range(count):
        rise = (4.5 * i + (3.5 if y is None else 0)) * (-1 if down else 1)
        shift = ScaledTranslation(aside / 72, rise / 72, ax.figure.dpi_scale_trans)
        style = {**style, 'marker': marker, 'ls': '', 'ms': 3.6, 'mew': 0.7, 'zorder': 5}
        ax.plot([x], [float(down) if y is None else y], transform=base + shift, clip_on=False, scaley=False,
                **style)


def draw_arm(ax, xs, columns, arm, hidden=()):
    """Every seed a point, the median a line, minimum to maximum a band. Where a seed has no value (None),
    line and band break. `hidden` holds (column, seed) whose point is drawn elsewhere."""
    whole = [c if c and None not in c else [math.nan] for c in columns]
    low, middle, high = ([float(f(c)) for c in whole] for f in (min, np.median, max))
    style = ARM_STYLES[arm]
    ax.fill_between(xs, low, high, color=style['color'], alpha=0.18, linewidth=0)
    ax.plot(xs, middle, **{**style, 'marker': ''})
    points = [(xs[i], v) for i, c in enumerate(columns) for k, v in enumerate(c)
              if v is not None and (i, k) not in hidden]
    ax.plot([x for x, _ in points], [v for _, v in points], **{**style, 'ls': ''})


def title_panels(axes, texts):
    for letter, ax, text in zip('abcdefghijklmnopqrstuvwxyz', axes.flat, texts):
        ax.set_title(f'({letter}) {text}')


def layers(depth):
    return f'{depth} layer' + 's' * (depth > 1)


def depth_axis(ax, study):
    ax.set_xscale('log')
    ax.set_xlim(study.depths[0] / 1.25, study.depths[-1] * 1.25)
    ax.set_xticks(study.depths, [str(d) for d in study.depths])
    ax.tick_params(axis='x', which='minor', bottom=False, labelbottom=False)
    ax.set_xlabel('depth (layers)')


def lr_axis(ax, study, values, room):
    """A log axis of LRs with ticks at those of the grid, which are the resolution of what is shown, from the
    one below the lowest value to the one above the highest; `room` is the factor left beyond them."""
    seen = [v for v in values if v is not None and 0 < v < math.inf] or study.lrs
    first = max(sum(lr < min(seen) for lr in study.lrs) - 1, 0)
    ticks = study.lrs[first:sum(lr <= max(seen) for lr in study.lrs) + 1]
    ax.set_yscale('log')
    ax.set_ylim(ticks[0] / room, ticks[-1] * room)
    ticks = ticks[::(len(ticks) + 7) // 8]
    ax.set_yticks(ticks, [f'{lr:g}' for lr in ticks])
    ax.tick_params(axis='y', which='minor', left=False, labelleft=False)


def save(study, fig, name, header, rows):
    """The figure as PDF and PNG, and what it shows as CSV; without dates, so that a rerun writes the same."""
    folder = study.folder / 'figures'
    folder.mkdir(exist_ok=True)
    fig.savefig(folder / f'{name}.pdf', metadata={'CreationDate': None})
    fig.savefig(folder / f'{name}.png')
    with open(folder / f'{name}.csv', 'w', newline='', encoding='utf-8') as f:
        writer = csv.writer(f, lineterminator='\n')
        writer.writerow(header)
        writer.writerows([f'{v:.9g}' if isinstance(v, float) else v for v in row] for row in rows)


def save_cells(study, fig, figure_name, names):
    """Saves a figure with the CSV of every planned cell; the fields of a missing one are empty."""
    rows = []
    for cell in sorted([*study.runs, *study.missing], key=lambda c: (c[1], c[2], c[0], c[3])):
        run = study.runs.get(cell)
        status = 'missing' if run is None else 'diverged' if run['diverged'] else 'ok'
        values = study.values.get(cell, {})
        rows.append([cell[1], cell[2], ARMS[cell[0]], cell[3], status, *(values.get(name) for name in names)])
    save(study, fig, figure_name, ['depth', 'lr', 'arm', 'seed', 'status', *names], rows)


def lr_columns(study, arm, depth, name):
    """Per LR the values of the begun seeds (None: missing), and the (LR, seed) indices of diverged runs."""
    cells = [[(arm, depth, lr, seed) for seed in study.begun] for lr in study.lrs]
    columns = [[study.values.get(cell, {}).get(name) for cell in row] for row in cells]
    diverged = {(i, k) for i, row in enumerate(cells) for k, cell in enumerate(row)
                if cell in study.runs and study.runs[cell]['diverged']}
    return columns, diverged


def figure_loss(study):
    """Fig. 1: final loss against LR, one panel a depth."""
    fig, axes = new_figure(PAGE, 2.5, 1, len(study.depths), sharex=True, sharey=True)
    l0 = float(np.median([run['l0'] for run in study.runs.values()]))
    low = min(run['loss'] for run in study.runs.values())
    mark = r'diverged run (counts as $\ell_0$)'
    entries = legend_entries(study, mark)
    unit = (l0 - low) / 100  # about one point on paper; stacks need room beyond the data
    room = 5 * len(study.begun)
    axes[0, 0].set_ylim(low - (7 + (5 + room) * ('missing run' in entries)) * unit,
                        l0 + (6 + room * (mark in entries)) * unit)
    for ax, depth in zip(axes[0], study.depths):
        ax.set_xscale('log')
        ax.axhline(l0, **GUIDE)
        for arm, style in ARM_STYLES.items():
            columns, diverged = lr_columns(study, arm, depth, 'loss')
            draw_arm(ax, study.lrs, columns, arm, hidden=diverged)
            for i, (lr, column) in enumerate(zip(study.lrs, columns)):
                aside = 2.1 if arm else -2.1
                stack(ax, lr, l0, sum(index == i for index, _ in diverged), style, '^', aside)
                stack(ax, lr, None, column.count(None), style, 'X', aside)
        ax.set_xlabel('peak learning rate')
    title_panels(axes, map(layers, study.depths))
    axes[0, 0].set_ylabel('final validation loss (nats)')
    legend(fig, {**entries, r'loss at initialisation, $\ell_0$': GUIDE})
    save_cells(study, fig, 'fig1_loss', ('loss', 'perplexity', 'bpb', 'l0'))


def figure_sensitivity(study):
    """Fig. 2: LR sensitivity and maximum stable LR against depth."""
    fig, axes = new_figure(COLUMN, 2.2, 1, 2)
    names = {'sensitivity': 'learning-rate sensitivity (nats)',
             STABLE: 'maximum stable learning rate'}
    for ax, (name, label) in zip(axes[0], names.items()):
        shown = []
        for arm, style in ARM_STYLES.items():
            xs = [d * (1.03 if arm else 1 / 1.03) for d in study.depths]  # apart, to show equal values
            columns = [[v for seed, v in zip(study.seeds, study.arms[name][d][arm]) if seed in study.begun]
                       for d in study.depths]
            draw_arm(ax, xs, columns, arm)
            for x, column in zip(xs, columns):
                stack(ax, x, None, column.count(None), style, 'X')
                shown += column
        depth_axis(ax, study)
        ax.set_ylabel(label)
        if name == 'sensitivity':
            ax.set_ylim(bottom=0)
            continue
        lr_axis(ax, study, shown, 1.9)
        if study.lrs[-1] in shown:
            ax.axhline(study.lrs[-1], **GUIDE)
            ax.annotate('edge of the grid', (0.02, study.lrs[-1]), xycoords=ax.get_yaxis_transform(),
                        xytext=(0, 4), textcoords='offset points', color=GUIDE['color'])
    title_panels(axes, ('', ''))
    legend(fig, legend_entries(study, diverged=None))
    rows = [[d, ARMS[arm], seed, *(study.arms[name][d][arm][k] for name in names)]
            for d in study.depths for arm in ARMS for k, seed in enumerate(study.seeds)]
    save(study, fig, 'fig2_sensitivity', ['depth', 'arm', 'seed', 'lr_sensitivity', 'max_stable_lr'], rows)


def figure_necessity(study):
    """Fig. 3: necessity LR against depth, the mean of the seeds' trends, for the last crossing its band."""
    fig, axes = new_figure(COLUMN, 2.4, 1, 1)
    ax = axes[0, 0]
    entries, shown = {}, []
    xs = np.geomspace(study.depths[0], study.depths[-1], 50).tolist()
    for kind, style in NECESSITY_STYLES.items():
        entries[f'{kind} upward crossing'] = style
        fits = seed_fits(study, 'necessity_' + kind)
        if None not in fits:
            trend = [exp_summary(summary([slope * math.log(x) + start for slope, start in fits])) for x in xs]
            ax.plot(xs, [t['mean'] for t in trend], **{**style, 'marker': ''})
            if kind == 'last' and len(fits) > 1:
                band = {'color': style['color'], 'alpha': 0.2}
                ax.fill_between(xs, [t['lo'] for t in trend], [t['hi'] for t in trend], linewidth=0, **band)
                entries['95 % band of its trend'] = {'lw': 5, **band}
        for depth, row in study.pairs['necessity_' + kind].items():
            values = [v for seed, v in zip(study.seeds, row) if seed in study.begun]
            x = depth * (1.035 if kind == 'last' else 1 / 1.035)
            points = [v for v in values if v is not None and 0 < v < math.inf]
            ax.plot([x] * len(points), points, **{**style, 'ls': ''})
            stack(ax, x, None, values.count(math.inf), style, '^', down=True)
            stack(ax, x, None, values.count(0.0), style, 'v', aside=-3)
            stack(ax, x, None, values.count(None), style, 'X', aside=3)
            shown += values
    for value, label, marker in ((math.inf, 'never', '^'), (0.0, 'below grid', 'v'), (None, 'missing', 'X')):
        if value in shown:
            entries[label] = {**EVENT, 'marker': marker}
    depth_axis(ax, study)
    lr_axis(ax, study, shown, 1.3 if all(v and v < math.inf for v in shown) else 2.5)
    ax.set_ylabel('necessity learning rate')
    legend(fig, entries, 2)
    pairs = [study.pairs['necessity_' + kind] for kind in NECESSITY_STYLES]
    rows = [[depth, seed, *(lr_text(study, pair[depth][k]) for pair in pairs)]
            for depth in study.depths for k, seed in enumerate(study.seeds)]
    save(study, fig, 'fig3_necessity', ['depth', 'seed', 'necessity_lr_last', 'necessity_lr_first'], rows)


def figure_mechanism(study):
    """Fig. 4: max attention logit, attention entropy and kurtosis at the last evaluation, against LR."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    fig, axes = new_figure(PAGE, 4.8, len(SHOWN), len(study.depths), sharex=True, sharey='row')
    for row, name in zip(axes, SHOWN):
        for ax, depth in zip(row, study.depths):
            ax.set_xscale('log')
            ax.margins(y=0.3 if study.gaps else 0.08)  # missing runs are marked at the lower end
            for arm, style in ARM_STYLES.items():
                columns, diverged = lr_columns(study, arm, depth, name)
                ends = [[None if (i, k) in diverged else v for k, v in enumerate(column)]
                        for i, column in enumerate(columns)]
                draw_arm(ax, study.lrs, ends, arm)
                for i, k in sorted(diverged):
                    ax.plot(study.lrs[i], columns[i][k], **{**style, 'ls': '', 'marker': '^'})
                for lr, column in zip(study.lrs, columns):
                    stack(ax, lr, None, column.count(None), style, 'X', 2.1 if arm else -2.1)
        row[0].set_ylabel(MECHANISM[name][0])
    for ax in axes[0]:
        ax.set_yscale('log')
        ax.axhline(1e4, **GUIDE)
    sizes = {run['config']['block_size'] for run in study.runs.values()}
    for ax in axes[1]:
        ax.axhline(np.mean(np.log(np.arange(2, max(sizes) + 1))), **GUIDE)  # the mean of ln t over t >= 2
    for ax in axes[2]:
        ax.set_yscale('log')
        ax.axhline(3, **GUIDE)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f'{v:g}'))
        ax.yaxis.set_minor_locator(NullLocator())
    for ax in axes[-1]:
        ax.set_xlabel('peak learning rate')
    title_panels(axes, [layers(depth) for depth in study.depths] * len(SHOWN))
    fig.align_ylabels(axes[:, 0])
    legend(fig, {**legend_entries(study, 'diverged run (last evaluation)'),
                 r'for scale: logit $10^4$, uniform attention, kurtosis of a Gaussian': GUIDE})
    save_cells(study, fig, 'fig4_mechanism', [name + end for name in SHOWN for end in ('', '_extreme')])


def curve_lrs(study, depth):
    """For Fig. 5, {what: LR}: the off arm's best by its mean loss, and the lowest above its maximum stable LR
    in every seed (the largest LR if there is none). Empty where no seed has the whole curve."""
    tops = [v for v in study.arms[STABLE][depth][0] if v is not None]
    whole = [seed for seed, v in zip(study.seeds, study.arms['best_loss'][depth][0]) if v is not None]
    if not whole:
        return {}
    best = min(study.lrs, key=lambda lr: sum(study.runs[0, depth, lr, seed]['loss'] for seed in whole))
    above = [lr for lr in study.lrs if not any(lr <= top for top in tops)]
    return {"off's best": best, **({'off unstable': above[0]} if above else {'the largest': study.lrs[-1]})}


def figure_curves(study):
    """Fig. 5: validation loss during training at a stable and at an unstable LR, one line a seed."""
    from matplotlib.ticker import MultipleLocator
    fig, axes = new_figure(PAGE, 3.7, 2, len(study.depths), sharex=True, sharey=True)
    l0 = float(np.median([run['l0'] for run in study.runs.values()]))
    lrs = [list(curve_lrs(study, depth).items()) for depth in study.depths]
    titles, rows = [], []
    for row in range(2):
        for ax, depth, found in zip(axes[row], study.depths, lrs):
            ax.axhline(l0, **GUIDE)
            kind, lr = found[row] if found else ('no seed has every LR', None)
            titles.append(f'{layers(depth)}, ' + (f'LR {lr:g} ({kind})' if found else kind))
            for cell in sorted(cell for cell in study.runs if cell[1:3] == (depth, lr)):
                run, style = study.runs[cell], ARM_STYLES[cell[0]]
                steps, loss = series(run, 'val_loss')
                ax.plot(steps, loss, **{**style, 'marker': '', 'lw': 0.9})
                if run['diverged']:
                    ax.plot(steps[-1], loss[-1], **{**style, 'marker': '^'})
                rows += [[depth, lr, ARMS[cell[0]], cell[3], int(s), float(v)] for s, v in zip(steps, loss)]
    title_panels(axes, titles)
    axes[0, 0].yaxis.set_major_locator(MultipleLocator(1))
    for ax in axes[-1]:
        ax.set_xlabel('training step')
    for ax in axes[:, 0]:
        ax.set_ylabel('validation loss (nats)')
    entries = legend_entries(study, 'diverged run (last evaluation)', marker='')
    entries.pop('missing run', None)
    legend(fig, {**entries, r'loss at initialisation, $\ell_0$': GUIDE})
    save(study, fig, 'fig5_curves', ['depth', 'lr', 'arm', 'seed', 'step', 'val_loss'], rows)


# -----------------------------------------------------------------------------
# commands

def write(path, text):
    path.write_text(text, encoding='utf-8', newline='\n')


def write_study(study):
    """All files of a study, and the paragraphs on the terminal."""
    results = json.dumps(plain(results_of(study)), indent=1, allow_nan=False)
    write(study.folder / 'results.json', results + '\n')
    write(study.folder / 'report.md', report(study))
    write(study.folder / 'tables.md', section(study))
    write(study.folder / 'tables.tex', '\n'.join(latex(*t) for t in tables(study)))
    setup_matplotlib()
    for figure in (figure_loss, figure_sensitivity, figure_necessity, figure_mechanism, figure_curves):
        figure(study)
    paragraphs = [coverage_text(study), *(v['text'] for v in study.verdicts.values())]
    paragraphs += [f'Left out: {name} ({why})' for name, why in study.left_out.items()]
    for text in paragraphs:
        print(textwrap.fill(text, 100) + '\n')
    print(f'Wrote results.json, report.md, tables.md, tables.tex and figures/ into {study.folder}')


def suggest(study):
    """Bisects, in log LR, the brackets of the maximum stable LR and of both necessity crossings.
    The line holds the old LRs too, so that the plan of the study is extended rather than replaced."""
    brackets = {}
    for depth in study.depths:
        for arm in ARMS:
            for lr in study.arms[STABLE][depth][arm]:
                if lr and lr < study.lrs[-1]:
                    reason = f'maximum stable LR, {ARMS[arm]}, depth {depth}'
                    brackets.setdefault(study.lrs.index(lr), Counter())[reason] += 1
        for name in ('necessity_last', 'necessity_first'):
            for lr in study.pairs[name][depth]:
                if lr and 0 < lr < math.inf:
                    reason = f"{name.replace('_', ' LR, ')} crossing, depth {depth}"
                    below = max(i for i, g in enumerate(study.lrs) if i == 0 or g < lr)
                    brackets.setdefault(min(below, len(study.lrs) - 2), Counter())[reason] += 1
    lrs = set(study.lrs)
    for i, reasons in sorted(brackets.items(), key=lambda item: (-sum(item[1].values()), item[0])):
        middle = float(f'{math.sqrt(study.lrs[i] * study.lrs[i + 1]):.3g}')
        lrs.add(middle)
        why = '; '.join(f'{reason} ({n} of {len(study.seeds)} seeds)' for reason, n in
                        sorted(reasons.items()))
        print(f'# {middle:g} halves {study.lrs[i]:g} to {study.lrs[i + 1]:g}: {why}')
    if not brackets:
        print('# no bracket to sharpen: no seed has a complete curve with a stable and an unstable LR')
    print(f'LRS="{" ".join(f"{lr:g}" for lr in sorted(lrs))}"')


def differences(a, b):
    """Where two runs of a cell differ, apart from times: {field: largest relative difference}."""
    found = {}
    for column, fields in a['rows'].items():
        others = b['rows'].get(column, [])
        if column not in TIMES_AND_MEMORY and fields != others:
            pairs = [(float(x or 'nan'), float(y or 'nan')) for x, y in zip(fields, others) if x != y]
            sizes = [abs(x - y) / (max(abs(x), abs(y)) or 1) for x, y in pairs]
            found[column] = max((s for s in sizes if math.isfinite(s)), default=0.0)
    for key in sorted(set(a['footer']) | set(b['footer'])):
        if key not in TIMES_AND_MEMORY and a['footer'].get(key) != b['footer'].get(key):
            found['closing line, ' + key] = 0.0
    return found


def compare(one, two):
    """Two studies of one grid, cell by cell; returns whether all three verdicts agree."""
    for key in ('lrs', 'depths', 'seeds'):
        grids = [' '.join(f'{v:g}' for v in getattr(study, key)) for study in (one, two)]
        if grids[0] != grids[1]:
            bad_input(f'{one.folder} and {two.folder} have different grids: {key} {grids[0]} / {grids[1]}')
    both = [cell for cell in one.runs if cell in two.runs]
    print(f'{len(both)} cells in both, {len(one.runs) - len(both)} only in {one.folder}, '
          f'{len(two.runs) - len(both)} only in {two.folder}')
    settings = Counter()
    for cell in both:
        a, b = one.runs[cell]['identity'], two.runs[cell]['identity']
        settings.update(f'{key} {a.get(key)} / {b.get(key)}' for key in {*a, *b} if a.get(key) != b.get(key))
    for text, n in sorted(settings.items()):
        print(f'  {text} in {n} cells')
    gaps = []
    for cell in both:
        a, b = one.runs[cell], two.runs[cell]
        found = differences(a, b)
        if found:
            gaps.append(abs(a['loss'] - b['loss']))
            worst = max(found, key=found.get)
            print(f"  {a['name']}: loss {a['loss']:.6g} / {b['loss']:.6g} "
                  f"({b['loss'] - a['loss']:+.3g} nats); largest relative {found[worst]:.2g} in {worst}")
    print(f'identical: {len(both) - len(gaps)} of {len(both)} cells' + (
        f'; the others differ in final loss by at most {max(gaps):.3g} nats (median {np.median(gaps):.3g})'
        if gaps else ''))
    verdicts = {name: (v['verdict'], two.verdicts[name]['verdict']) for name, v in one.verdicts.items()}
    for name, (a, b) in verdicts.items():
        print(f'{name}: {a} / {b}, ' + ('they agree' if a == b else 'they do not agree'))
    return all(a == b for a, b in verdicts.values())


BEGIN, END = '<!-- results:begin -->', '<!-- results:end -->'


def with_results(text, study):
    """README text with the results of the study and of its variants put between the two markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        bad_input(f'README.md should hold the line {BEGIN} and after it the line {END}, once each')
    texts = [coverage_text(study), *(v['text'] for v in study.verdicts.values()), mechanism_text(study)]
    variants = variant_table(study)
    body = '\n'.join(f'- {text}' for text in texts) + '\n\n' + (markdown(*variants) if variants[2] else '')
    return text[:text.index(BEGIN) + len(BEGIN)] + '\n' + body + text[text.index(END):]


def main(argv=None):
    parser = argparse.ArgumentParser(description='From the logs of a study to its figures and verdicts.',
                                     allow_abbrev=False)
    parser.error = bad_input
    parser.add_argument('study', nargs='?', help='folder of logs, such as logs/cpu')
    parser.add_argument('--allow-mixed', action='store_true',
                        help='analyse logs of different code, data or settings together')
    parser.add_argument('--suggest', action='store_true',
                        help='print the learning rates that would sharpen the brackets most, for sweep.sh')
    parser.add_argument('--compare', nargs=2, metavar=('A', 'B'),
                        help='compare two studies of one grid, cell by cell (exit status 1: verdicts differ)')
    parser.add_argument('--readme', action='store_true',
                        help='rewrite the results in README.md (study: logs/cpu unless given)')
    args = parser.parse_args(argv)
    if args.study and args.compare:
        bad_input(f'--compare takes two studies, {args.study} is a third')
    if (args.compare is not None) + args.suggest + args.readme > 1:
        bad_input('--compare, --suggest and --readme: one at a time')
    if args.compare:
        return 0 if compare(*(analyze(folder, args.allow_mixed) for folder in args.compare)) else 1
    if not args.study and not args.readme:
        bad_input('give a folder of logs, such as logs/cpu (--help shows the rest)')
    study = analyze(args.study or 'logs/cpu', args.allow_mixed)
    if args.suggest:
        suggest(study)
    elif args.readme:
        readme = Path('README.md')
        write(readme, with_results(readme.read_text(encoding='utf-8'), study))
        print(f'README.md now holds the results of {study.folder}')
    else:
        write_study(study)
    return 0


if __name__ == '__main__':
    try:
        sys.exit(main())
    except OSError as e:
        bad_input(f"{e.filename or 'output'}: {e.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
