"""The diary of the embedding: how often each row of C is fetched, and how far it moves.

`python tests/diary.py` takes some ten seconds. It tests what is told of a rare character such as q:
hardly any batch fetches its row, so the row hardly moves, and keeps apart from the others. The MLP
is trained on data/names.txt with the sizes of the lectures and with the defaults, each under SGD,
which moves only the rows that a batch has fetched, and under Adam, whose running means move the
others too. A figure is the mean of three runs, which differ in first values and batches.
"""
import argparse
import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model as m
import train

import numpy as np

LECTURES = dict(embd=2, hidden=100, init='naive', batchnorm=False)
RATES = dict(SGD=0.1, Adam=train.DEFAULTS['mlp']['lr'])
RUNS = {f'{sizes} {optimizer}': dict(given, optimizer=optimizer.lower(), lr=lr)
        for sizes, given in (('lectures', LECTURES), ('defaults', {}))
        for optimizer, lr in RATES.items()}
SEEDS = 1, 2, 3


class Diary(NamedTuple):
    fetches: np.ndarray     # (steps, V)         how often each batch fetches each row of C
    C: np.ndarray           # (steps + 1, V, E)  the table before each step, and after the last


def write_diary(examples, given, steps, seed):
    """Train as train.py does, with what is given over the defaults; returns the Diary."""
    run, _ = train.start(dict(given, steps=steps, seed=seed))
    shapes = m.parameter_shapes(run.config)
    flat = np.concatenate([w.ravel() for w in run.p.values()])                  # (size,)
    flat_g = np.zeros((1, flat.size), np.float32)                               # (1, size)
    run.p, g = m.views(shapes, flat), m.views(shapes, flat_g[0])
    fetches, C = [], [run.p['C'].copy()]
    for _, batch in zip(range(steps), train.batches(run.config, examples, 0)):
        train.train_step(run, batch, flat, flat_g, g, [])
        fetches.append(np.bincount(batch.X.ravel(), minlength=len(run.vocabulary)))
        C.append(run.p['C'].copy())
    return Diary(np.array(fetches), np.array(C))


def ranks(values):
    """The place of each value if they are sorted, from 0."""
    return np.argsort(np.argsort(values))


def read_diaries(diaries):
    """What some diaries say of each row of C, on average, by name: arrays (V,)."""
    read = []
    for fetches, C in diaries:
        walked = np.linalg.norm(np.diff(C, axis=0), axis=2)                     # (steps, V)
        early, moved = (np.linalg.norm(C[step] - C[0], axis=1) for step in (len(C) // 10, -1))
        read.append(dict(
            fetches=fetches.mean(0), without=(fetches == 0).mean(0), path=walked.sum(0),
            unfetched=np.where(fetches == 0, walked, 0).sum(0),  # the path in steps without it
            early=early, moved=moved, place=ranks(-moved) + 1,
            apart=np.linalg.norm(C[-1] - C[-1].mean(0), axis=1)))
    return {name: np.mean([rows[name] for rows in read], 0) for name in read[0]}


def compare(rows, C, rare, step):
    """The rare row beside the median row, and all rows beside their fetches: figures by name."""
    over = {name: rows[name][rare] / np.median(rows[name])
            for name in ('path', 'early', 'moved', 'apart')}
    follows = {f'{name}_follows': np.corrcoef(ranks(rows['fetches']), ranks(rows[name]))[0, 1]
               for name in ('path', 'moved')}
    return dict(**over, **follows, place=rows['place'][rare],
                jump=np.linalg.norm(C[step + 1, rare] - C[step, rare]),
                unfetched=rows['unfetched'][rare] / rows['path'][rare])


def report(characters, diaries):
    """Print what the diaries {label: one for each seed} say, and where the story is true."""
    runs = {label: read_diaries(written) for label, written in diaries.items()}
    fetches, rows = diaries['lectures SGD'][0].fetches, runs['lectures SGD']    # the same in all
    rare, steps = rows['fetches'].argmin(), len(fetches)
    q, step = characters[rare], steps // 2 + (fetches[steps // 2:, rare] == 0).argmax()
    print(f'{steps:,} steps. A batch fetches {fetches[0].sum()} rows, each '
          f'{fetches[0].mean():.1f} times on average. "." is the boundary token.\npath: all steps '
          'of a row added up; moved: the distance of its last value from its first\n')
    print(f'{"":<26}', *(f'{label:>18}' for label in runs))
    print('  fetches   batches without', *['     path    moved'] * len(runs))
    for i in np.argsort(-rows['fetches']):
        print(f'{characters[i]} {rows["fetches"][i]:>7.2f} {rows["without"][i]:>17.1%}',
              *(f'{run["path"][i]:>9.2f} {run["moved"][i]:>8.2f}' for run in runs.values()))

    figures = {label: compare(runs[label], diaries[label][0].C, rare, step) for label in runs}
    early, late = f'by step {steps // 10:,}', f'by step {steps:,}'
    print(f'\n{"":<44}', *(f'{label:>14}' for label in runs))
    for name, title in dict(
            jump=f'step {step + 1:,} has no {q}: its row moves by',
            unfetched=f'part of its path in all steps without {q}',
            path=f'{q} / the median row: path', early=f'{q} / the median row: moved {early}',
            moved=f'{q} / the median row: moved {late}',
            apart=f'{q} / the median row: distance from the mean',
            place=f'place of {q} by moved, 1 to {len(characters)} (the least)',
            path_follows='rank correlation of fetches and path',
            moved_follows='rank correlation of fetches and moved').items():
        print(f'{title:<44}', *(f'{figures[label][name]:>14.2g}' for label in runs))

    def where(name, least, most):
        labels = [label for label in runs if least < figures[label][name] < most]
        return ', '.join(labels) or 'no run'

    print('\nWhere it is true that a row with fewer fetches (rank correlation above 0.9)'
          f'\n  has a shorter path: {where("path_follows", 0.9, 2)}'
          f'\n  has moved less: {where("moved_follows", 0.9, 2)}'
          f'\nWhere {q} has moved less than the median row'
          f'\n  {early}: {where("early", 0, 1)}\n  {late}: {where("moved", 0, 1)}')


def main(argv=None):
    parser = argparse.ArgumentParser('diary.py', description=__doc__)
    parser.add_argument('--steps', type=int, default=10000, help='of each run (10000)')
    steps = parser.parse_args(argv).steps
    with contextlib.redirect_stderr(io.StringIO()):        # what is said about the data
        run, words = train.start({})
        examples = m.mlp_examples(sorted(train.split(words)[0]), run.vocabulary,
                                  run.config['context'])
        diaries = {label: [write_diary(examples, given, steps, seed) for seed in SEEDS]
                   for label, given in RUNS.items()}
    report('.' + run.vocabulary[1:], diaries)


if __name__ == '__main__':
    main()
