"""A language model from scratch, file 4 of 4: invents names, or scores given ones.

`python sample.py` takes the newest checkpoint in out/. Names go to standard output, one a line and
nothing else; messages go to standard error.
"""
import argparse
import json
import math
import secrets
import shlex
import sys
import unicodedata
from functools import partial
from pathlib import Path

import model as m
from train import (
    SIGNS, UserError, check_picture, command, load, log, number, read_lines, save_figure)

import numpy as np


def parse(argv):
    """What the user gave, and the defaults."""
    parser = argparse.ArgumentParser('sample.py', description='Invent names, or score given ones.')
    add, to_nfc = parser.add_argument, partial(unicodedata.normalize, 'NFC')    # as the data is
    add('checkpoint', nargs='?', metavar='CHECKPOINT', help='default: the newest in out/')
    add('-n', type=number(int, 0), default=20, metavar='N', help='how many names (20)')
    add('--seed', type=number(int, 0), metavar='N', help='same seed, same names (a random one)')
    add('--temperature', type=number(float, 0), default=1., metavar='F',
        help='below 1 likelier characters, above 1 wilder ones, 0 always the likeliest (1)')
    add('--top-k', type=number(int, 0), default=0, metavar='N',
        help='only from the N likeliest characters, 0: from all (0)')
    add('--top-p', type=number(float, 0, 1), default=0., metavar='F',
        help='only from the likeliest that have this probability together, 0: from all (0)')
    add('--prefix', type=to_nfc, default='', metavar='TEXT',
        help='how each name begins; --prefix=-x for one that begins with a dash')
    add('--max-len', type=number(int, 1, 2**16), metavar='N', help='only names up to N characters')
    add('--unique', action='store_true', help='no name twice')
    add('--new', action='store_true', help='no name that is in the data')
    add('--data', metavar='FILE', help='where the data is, if it has been moved')
    add('--score', type=to_nfc, nargs='+', metavar='WORD',
        help='print log-probability in nats, the same per character, and perplexity instead; '
             '- reads the words from standard input')
    add('--plot', metavar='FILE',
        help='with --score, draw what the model predicts in the word, and where the GPT looks')
    add('--json', action='store_true', help='one JSON object a line')
    return parser.parse_args(argv)


def newest():
    """The checkpoint in out/ that was written last."""
    found = list(Path('out').glob('*.npz'))
    if not found:
        raise UserError('there is no checkpoint in out/: run train.py first, or name one')
    return max(found, key=lambda path: path.stat().st_mtime)


def problem(model, text):
    """Why the model cannot read a text; '' if it can."""
    try:
        m.batch_of(model, [text])
    except KeyError as error:
        return f'the model does not know {error}'
    except ValueError as error:
        return str(error)
    return ''


def read_data(config, path):
    """The set of words that the model was trained on; None if the file is gone or has changed."""
    try:
        lines, sha256 = read_lines(path or config['data'] or m.NAMES)
    except (OSError, UserError):
        return None
    return set(lines) if sha256 == config['sha256'] else None


def print_scores(model, words, as_json):
    """Print the score of each word; returns 1 if one of them cannot be scored, else 0."""
    status = 0
    for text in words:
        why = problem(model, text) if text else 'it is empty'
        if why:
            status = 1
            scores = dict(word=text, logprob=None, per_char=None, perplexity=None, error=why)
            line = f'{text}\tno score: {why}'
        else:
            logprob = m.score(model, text)
            per_char = logprob / (len(text) + 1)           # the end of a word is predicted too
            perplexity = math.exp(min(-per_char, 700))     # e^710 is too large for a float
            scores = dict(word=text, logprob=logprob, per_char=per_char, perplexity=perplexity)
            line = f'{text}\t{logprob:.4f}\t{per_char:.4f}\t{perplexity:.4f}'
        print(json.dumps(scores, ensure_ascii=False) if as_json else line)
    return status


def print_names(model, args, known):
    """Print args.n names, or as many as can be found; `known` are the words of the data or None."""
    rng, terminal = np.random.default_rng(args.seed), sys.stdout.isatty()
    seen, found, copies, tries = set(), 0, 0, 0            # tries: since the last name
    # The size of a block does not depend on n: the names of -n 10 are the first ten of -n 20.
    size = max(1, min(500, 8000 // model.config['longest']))                # to limit the memory
    while found < args.n and tries < 10000:
        tries += size
        for name in m.generate(model, size, rng, args.temperature, args.top_k, args.top_p,
                               args.prefix, args.max_len):
            in_data = None if known is None else name in known
            if found == args.n:
                break
            if (args.unique and name in seen) or (args.new and in_data):
                continue
            seen.add(name)
            tries = 0
            found += 1
            copies += bool(in_data)
            if args.json:               # NFC may have merged two characters into an unknown one
                logprob = None if problem(model, name) else m.score(model, name)
                print(json.dumps(dict(name=name, logprob=logprob, in_data=in_data),
                                 ensure_ascii=False))
            else:
                print(f'{name}  (in the data)' if in_data and terminal else name)
    if found < args.n:
        log(f'found {found} of {args.n}, and nothing more in {tries} tries')
    if terminal and known is not None:
        log(f'{copies} of {found} names are in the data')


def plot(model, word):
    """A Figure of what the model predicts in a word, and of the attention weights of the GPT."""
    from matplotlib.figure import Figure

    batch = m.batch_of(model, [word])
    _, acts = m.predict(model, batch)
    probs, layers, A = acts['probs'], acts.get('layers', []), model.config.get('heads', 1)
    text, n, L = ('\0' + word).translate(SIGNS), len(probs), len(layers)
    # The ids of the 40 likeliest characters, and of those that came; sorted.
    rows = np.union1d(np.argsort(-probs.max(0))[:40], batch.Y)                  # (rows,)
    width = max(9, 0.6*n, 2 + 0.15*n*A)                    # in inches
    side = min((width - 1) / A, max(3, 0.2*n))             # of an attention map
    heights = [1.5 + 0.15*len(rows)] + ([0.8 + L*side] if L else [])
    figure = Figure(np.minimum([width, sum(heights)], 60), layout='constrained')
    # `bottom` has one part for the attention maps; none for the MLP.
    top, *bottom = np.atleast_1d(figure.subfigures(len(heights), height_ratios=heights))
    axes = top.subplots()
    image = axes.imshow(probs.T[rows], cmap='Blues', vmin=0, aspect='auto')
    axes.plot(range(n), np.searchsorted(rows, batch.Y), 'o', color='tab:red', fillstyle='none')
    axes.set_xticks(range(n), [f'{text[max(0, i - 2):i + 1]}\n{probs[i, batch.Y[i]]:.0%}'
                               for i in range(n)], parse_math=False)            # draw $ as $
    axes.set_yticks(range(len(rows)), [model.vocabulary[i].translate(SIGNS) for i in rows])
    axes.set(xlabel='after these characters; below: the probability of what came',
             title='Probability of the next character; a circle marks the one that came')
    top.colorbar(image)
    for part in bottom:
        maps = part.subplots(L, A, squeeze=False)
        for (l, head), axes in np.ndenumerate(maps):
            weights = np.full((n, n), np.nan)              # (n, n)
            # In a single word a character looks at all before it: the lower triangle, row by row.
            weights[np.tril_indices(n)] = layers[l]['weights'][head]            # (S,)
            image = axes.imshow(weights, cmap='Blues', vmin=0, vmax=1)
            axes.set(xticks=range(n), xticklabels=text, xlabel=f'head {head + 1}',
                     yticks=range(n), yticklabels=text, ylabel=f'layer {l + 1}', facecolor='0.9')
            axes.label_outer()
        part.suptitle('Attention weights: how much each row looks at each column')
        part.colorbar(image, ax=maps, aspect=40)
    return figure


@command
def main(argv=None):
    """Print names, or scores, by the best model in a checkpoint."""
    args = parse(argv)
    check_picture(args.plot)
    words = args.score or []
    if not args.checkpoint and len(words) > 1 and words[-1].endswith('.npz'):
        args.checkpoint = words.pop()   # as in --score emma out/gpt.npz
    elif not args.checkpoint:
        args.checkpoint = str(newest())
    run = load(args.checkpoint)
    model = run.best
    best = f'dev loss {min(dev for _, _, dev in run.history):.4f}' if run.history else 'not trained'
    log(f"{args.checkpoint}: {run.config['model']}, step {run.best_step()}, {best}")
    if words == ['-']:
        with open(0, encoding='utf-8', errors='replace', closefd=False) as file:    # 0: stdin
            words = [unicodedata.normalize('NFC', line.strip(' \t\n\ufeff')) for line in file]
    if args.plot and len(words) != 1:
        raise UserError('--plot draws one word: give one to --score')
    if args.score is not None:
        status = print_scores(model, words, args.json)
        if args.plot and not status:
            save_figure(plot(model, words[0]), args.plot)
        return status
    if why := problem(model, args.prefix):
        raise UserError(f'--prefix {args.prefix!r}: {why}')
    if args.max_len and args.max_len < len(args.prefix):
        raise UserError(f'--max-len {args.max_len} is shorter than --prefix {args.prefix!r}')
    known = read_data(run.config, args.data)
    if args.data and known is None:
        raise UserError(f'--data {args.data} is not the file that the model learnt from')
    if args.new and known is None:
        raise UserError('--new: the data is gone or has changed: name it with --data')
    if args.seed is None:
        args.seed = secrets.randbelow(2**31)
        given = list(sys.argv[1:] if argv is None else argv)
        if args.checkpoint not in given:                   # a newer one may come
            given = [args.checkpoint, *given]
        log('these names again: '
            + shlex.join(['python', sys.argv[0], f'--seed={args.seed}', *given]))
    print_names(model, args, known)


if __name__ == '__main__':
    sys.exit(main())
