"""What counting costs: how well a list of words is predicted without any training.

    python tests/counting.py [FILE ...]

A row for each order: with order 3, it is counted which character follows each two; order 2 is what
train.py compares a model with. The losses are in nats a character, on the split that train.py
makes. The default is data/names.txt, which takes some twenty seconds; a list of a thousand words
takes one.
"""
import math
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model as m
import train


def counting_loss(train_words, words, V, order):
    """The mean loss on `words` of an n-gram model, n = order, counted on train_words.

    P(x | h) = (count(h, x) + kinds(h) P(x | h[1:])) / (count(h) + kinds(h))
    where h is the characters before x, and kinds(h) how many different ones followed h (Witten-Bell
    smoothing). The empty h falls back on 1 / V, where V is the number of characters.
    """
    counts = defaultdict(Counter)       # of what follows, by history
    begin = '\0' * (order - 1)
    for word in train_words:
        text = begin + word + '\0'
        for i in range(order - 1, len(text)):
            for k in range(order):
                counts[text[i - k:i]][text[i]] += 1

    @cache
    def probability(history, x):
        shorter = probability(history[1:], x) if history else 1 / V
        seen = counts[history]
        return (seen[x] + len(seen) * shorter) / (seen.total() + len(seen)) if seen else shorter

    texts = [begin + word + '\0' for word in words]
    losses = [-math.log(probability(text[i - order + 1:i], text[i]))
              for text in texts for i in range(order - 1, len(text))]
    return sum(losses) / len(losses)


def main(paths):
    for path in paths or [m.NAMES]:
        words, _ = train.read_words(path, limit=100)
        parts, V = train.split(words), len(m.make_vocabulary(words))
        print(f'{path}\n{"order":>5} {"train":>8} {"dev":>8} {"test":>8}')
        for order in range(1, 7):
            losses = [counting_loss(parts[0], part, V, order) for part in parts]
            print(f'{order:>5} ' + ' '.join(f'{loss:>8.4f}' for loss in losses), flush=True)


if __name__ == '__main__':
    sys.exit(train.command(main)(sys.argv[1:]))
