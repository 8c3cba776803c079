"""A language model from scratch, file 4 of 4: invents names, or scores given ones.

`python sample.py` takes the newest checkpoint in out/. Names go to standard output, one a line and
nothing else; messages go to standard error.
"""
import argparse
import json
import math
import sys
import unicodedata
from functools import partial
from pathlib import Path

import model as m
from train import UserError, command, load, log, number, read_lines

import numpy as np


def parse(argv):
    """What the user gave, and the defaults."""
    parser = argparse.ArgumentParser('sample.py', description='Invent names, or score given ones.')
    add, to_nfc = parser.add_argument, partial(unicodedata.normalize, 'NFC')    # as the data is
    add('checkpoint', nargs='?', metavar='CHECKPOINT', help='default: the newest in out/')
    add('-n', type=number(int, 0), default=20, metavar='N', help='how many names (20)')
    add('--seed', type=number(int, 0), default=0, metavar='N', help='same seed, same names (0)')
    add('--temperature', type=number(float, 0), default=1., metavar='F',
        help='below 1 likelier characters, above 1 wilder ones, 0 always the likeliest (1)')
    add('--top-k', type=number(int, 0), default=0, metavar='N',
        help='only from the N likeliest characters, 0: from all (0)')
    add('--top-p', type=number(float, 0, 1), default=0., metavar='F',
        help='only from the likeliest that have this probability together, 0: from all (0)')
    add('--prefix', type=to_nfc, default='', metavar='TEXT',
        help='how each name begins; --prefix=-x for one that begins with a dash')
    add('--max-len', type=number(int, 1, 2**16), metavar='N', help='where a name is cut off')
    add('--unique', action='store_true', help='no name twice')
    add('--new', action='store_true', help='no name that is in the data')
    add('--score', type=to_nfc, nargs='+', metavar='WORD',
        help='print log-probability in nats, the same per character, and perplexity instead; '
             'a CHECKPOINT has to be named before it')
    add('--json', action='store_true', help='one JSON object a line')
    return parser.parse_args(argv)


def newest():
    """The checkpoint in out/ that was written last."""
    found = list(Path('out').glob('*.npz'))
    if not found:
        raise UserError('there is no checkpoint in out/: run train.py first, or name one')
    return max(found, key=lambda path: path.stat().st_mtime)


def check_text(model, what, text):
    """Raise UserError for a text that the model cannot read."""
    try:
        m.batch_of(model, [text])
    except KeyError as error:
        raise UserError(f'{what} {text!r}: the model does not know {error}')
    except ValueError as error:
        raise UserError(f'{what} {text!r}: {error}')


def read_data(config):
    """The set of words that the model was trained on; None if the file is gone or has changed."""
    try:
        lines, sha256 = read_lines(config['data'] or m.NAMES)
    except (OSError, UserError):
        return None
    return set(lines) if sha256 == config['sha256'] else None


def print_scores(model, words, as_json):
    """Print the score of each word, if all can be scored."""
    for text in words:
        if not text:
            raise UserError('--score takes words of at least one character')
        check_text(model, '--score', text)
    for text in words:
        logprob = m.score(model, text)
        per_char = logprob / (len(text) + 1)               # the end of a word is predicted too
        perplexity = math.exp(min(-per_char, 700))         # e^710 is too large for a float
        if as_json:
            print(json.dumps(dict(word=text, logprob=logprob, per_char=per_char,
                                  perplexity=perplexity), ensure_ascii=False))
        else:
            print(f'{text}\t{logprob:.4f}\t{per_char:.4f}\t{perplexity:.4f}')


def print_names(model, args, known):
    """Print args.n names, or as many as can be found; `known` are the words of the data or None."""
    rng, terminal = np.random.default_rng(args.seed), sys.stdout.isatty()
    seen, found, copies, misses = set(), 0, 0, 0
    # The size of a block does not depend on n: the names of -n 10 are the first ten of -n 20.
    size = max(1, min(500, 8000 // model.config['longest']))                # to limit the memory
    while found < args.n and misses < 10000:
        for name in m.generate(model, size, rng, args.temperature, args.top_k, args.top_p,
                               args.prefix, args.max_len):
            if found == args.n:
                break
            in_data = None if known is None else name in known
            if (args.unique and name in seen) or (args.new and in_data):
                misses += 1
                continue
            seen.add(name)
            misses = 0
            found += 1
            copies += bool(in_data)
            if args.json:
                print(json.dumps(dict(name=name, logprob=m.score(model, name), in_data=in_data),
                                 ensure_ascii=False))
            else:
                print(f'{name}  (in the data)' if in_data and terminal else name)
    if found < args.n:
        log(f'found {found} of {args.n}, and nothing more in {misses} tries')
    if terminal and known is not None:
        log(f'{copies} of {found} names are in the data')


@command
def main(argv=None):
    """Print names, or scores, by the best model in a checkpoint."""
    args = parse(argv)
    path = args.checkpoint or newest()
    run = load(path)
    model, known = run.best, read_data(run.config)
    best = f'dev loss {min(dev for _, _, dev in run.history):.4f}' if run.history else 'not trained'
    log(f"{path}: {run.config['model']}, step {run.best_step()}, {best}")
    if args.score:
        print_scores(model, args.score, args.json)
        return
    check_text(model, '--prefix', args.prefix)
    if args.max_len and args.max_len < len(args.prefix):
        raise UserError(f'--max-len {args.max_len} is shorter than --prefix {args.prefix!r}')
    if args.new and known is None:
        raise UserError('--new: the file that the model learnt from is gone or has changed')
    print_names(model, args, known)


if __name__ == '__main__':
    sys.exit(main())
