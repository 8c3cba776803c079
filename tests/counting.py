"""What counting costs: how well a list of words is predicted without any training.

    python tests/counting.py [FILE ...]

A row for each order: with order 3, it is counted which character follows each two. The losses are
those of train.counting_loss, in nats a character, on the split that train.py makes. The default is
data/names.txt, which takes some twenty seconds; a list of a thousand words takes one.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model as m
import train


def main(paths):
    for path in paths or [m.NAMES]:
        words, _ = train.read_words(path, limit=100)
        parts, size = train.split(words), len(m.make_vocabulary(words))
        print(f'{path}\n{"order":>5} {"train":>8} {"dev":>8} {"test":>8}')
        for order in range(1, 7):
            losses = [train.counting_loss(parts[0], part, size, order) for part in parts]
            print(f'{order:>5} ' + ' '.join(f'{loss:>8.4f}' for loss in losses), flush=True)


if __name__ == '__main__':
    sys.exit(train.command(main)(sys.argv[1:]))
