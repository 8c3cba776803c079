"""A language model from scratch, file 4 of 4: invents names, or scores given ones.

python sample.py takes the newest checkpoint in out/. Names go to standard output, one a line and
nothing else; what is meant for people goes to standard error.
"""
import argparse
import glob
import json
import math
import os
import sys
import unicodedata

import model as m
from model import Refusal, number

import numpy as np


def word(argument):
    """What was typed, in NFC as the data is."""
    return unicodedata.normalize('NFC', m.text(argument))


def read_command_line(argv):
    """What was typed, and what holds for the rest."""
    parser = argparse.ArgumentParser('sample.py', description='Invent names, or score given ones.')
    flag = parser.add_argument
    flag('checkpoint', nargs='?', metavar='CHECKPOINT', help='default: the newest in out/')
    flag('-n', type=number(int, 0), default=20, metavar='N', help='how many names (20)')
    flag('--seed', type=number(int, 0), default=0, metavar='N', help='same seed, same names (0)')
    flag('--temperature', type=number(float, 0), default=1., metavar='F',
         help='below 1 plainer, above 1 wilder, 0 always the likeliest (1)')
    flag('--top-k', type=number(int, 0), default=0, metavar='N',
         help='only from the N likeliest characters, 0: from all (0)')
    flag('--top-p', type=number(float, 0), default=0., metavar='F',
         help='only from the likeliest that have this probability together, 0: from all (0)')
    flag('--prefix', type=word, default='', metavar='TEXT',
         help='how each name begins; --prefix=-x for one that begins with a dash')
    flag('--max-len', type=number(int, 1, 2**16), metavar='N', help='where a name is cut off')
    flag('--unique', action='store_true', help='no name twice')
    flag('--new', action='store_true', help='no name that stands in the data')
    flag('--score', type=word, nargs='+', metavar='WORD',
         help='print log-probability in nats, the same per character, and perplexity instead; '
              'the checkpoint stands before it')
    flag('--json', action='store_true', help='one JSON object a line')
    return parser.parse_args(argv)


def newest():
    """The checkpoint in out/ that was written last."""
    found = list(filter(os.path.isfile, glob.glob(os.path.join('out', '*.npz'))))
    if not found:
        raise Refusal('there is no checkpoint in out/: run train.py first, or name one')
    return max(found, key=os.path.getmtime)


def check_text(model, what, word):
    """Refuse a text that the model cannot read."""
    unknown = sorted(set(word) - set(model['vocabulary'][1:]))
    if unknown:
        raise Refusal(f"{what} {word!r}: the model has never seen {', '.join(map(repr, unknown))}")
    longest = model['config']['context'] - 1
    if model['config']['model'] == 'gpt' and len(word) > longest:
        raise Refusal(f'{what} {word!r} has {len(word)} characters, this model reads {longest}')


def read_data(path, expected):
    """The words of the data file as a set, or None if it is not there or not the same any more."""
    if not os.path.isfile(path):        # to read a pipe would be to wait
        return None
    try:
        lines, sha256 = m.read_lines(path)
    except Refusal:
        return None
    return set(lines) if sha256 == expected else None


def print_scores(model, words, as_json):
    """Print the scores of all words; refuses before the first if one cannot be scored."""
    for word in words:
        if not word:
            raise Refusal('--score takes words of at least one character')
        check_text(model, '--score', word)
    for word in words:
        logprob = m.score(model, word)
        per_char = logprob / (len(word) + 1)               # its end is a character too
        perplexity = math.exp(-per_char) if per_char > -700 else None      # too large for a float
        if as_json:
            print(json.dumps(dict(word=word, logprob=logprob, per_char=per_char,
                                  perplexity=perplexity), ensure_ascii=False))
        else:
            print(f'{word}\t{logprob:.4f}\t{per_char:.4f}\t{perplexity or math.inf:.4f}')


def print_names(model, args, known):
    """Print args.n names, or what can be found; `known` are the words of the data, or None."""
    rng = np.random.default_rng(args.seed)
    printed, seen, in_data, in_vain = 0, set(), 0, 0
    terminal = sys.stdout.isatty()
    # as many each time, whatever n, so that -n 20 are those of -n 10 and then ten more
    size = max(1, min(500, 8000 // model['config']['longest']))
    while printed < args.n and in_vain < 10000:
        for name in m.generate(model, size, rng, args.temperature, args.top_k, args.top_p,
                               args.prefix, args.max_len):
            old = name in known if known is not None else None
            in_vain += 1
            if printed == args.n or args.unique and name in seen or args.new and old:
                continue
            seen.add(name)
            printed, in_vain = printed + 1, 0
            in_data += bool(old)
            if args.json:
                print(json.dumps(dict(name=name, logprob=m.score(model, name), in_data=old),
                                 ensure_ascii=False))
            else:
                print(f'{name}  (in the data)' if old and terminal else name)
    if printed < args.n:
        print(f'found {printed} of {args.n}, and nothing more in {in_vain} tries', file=sys.stderr)
    if terminal and known is not None:
        print(f'{in_data} of {printed} names stand in the data', file=sys.stderr)


@m.command
def main(argv=None):
    """Print names, or scores, of the best parameters in a checkpoint."""
    args = read_command_line(argv)
    path = newest() if args.checkpoint is None else args.checkpoint
    state = m.load(path)
    config, model = state['config'], state['best']
    data = config['data'] or m.DATA
    known = read_data(data, config['sha256'])
    dev = {step: dev for step, _, dev in state['history']}.get(state['best_step'])
    step = state['step'] if dev is None else state['best_step']
    print(f"{path}: {config['model']}, step {step}, "
          + ('not evaluated yet' if dev is None else f'dev loss {dev:.4f}'), file=sys.stderr)
    if args.score:
        print_scores(model, args.score, args.json)
        return
    check_text(model, '--prefix', args.prefix)
    if args.max_len and args.max_len < len(args.prefix):
        raise Refusal(f'--max-len {args.max_len} is shorter than the {len(args.prefix)} characters '
                      f'of --prefix {args.prefix!r}')
    if args.new and known is None:
        raise Refusal(f'--new: {data}, which the model learnt from, is not there or has changed')
    print_names(model, args, known)


if __name__ == '__main__':
    sys.exit(main())
