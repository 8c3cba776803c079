"""Turn a Social Security Administration file yobYYYY.txt (lines Name,Sex,Count) into a list of
lowercase names, one a line: F before M, the most frequent first, then by name."""

import argparse
import contextlib
import os
import re
import sys


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", help="the file to read, such as yob2018.txt")
    parser.add_argument("output", help="the list to write, such as data/names.txt")
    args = parser.parse_args(argv)

    rows = []
    try:
        # A byte that is not UTF-8 becomes a character no name has, so its line is reported below.
        with open(args.input, encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                match = re.fullmatch(r"([A-Za-z]+),([FM]),([0-9]{1,9})\n?", line)
                if match is None:
                    return fail(f"{args.input}, line {number}: expected Name,Sex,Count, "
                                f"found {line.rstrip()[:40]!r}.")
                name, sex, count = match.groups()
                rows.append((sex, -int(count), name))
    except OSError as error:
        return fail(f"Cannot read {args.input}: {error.strerror}.")
    if not rows:
        return fail(f"{args.input} has no names in it.")
    rows.sort()

    # The real path, so that a link to the list stays a link when the list is replaced.
    target = os.path.realpath(args.output)
    # Moving a file onto a device such as /dev/null would replace the device.
    if os.path.exists(target) and not os.path.isfile(target):
        return fail(f"Cannot write {args.output}: it is not a regular file.")
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8", newline="\n") as file:
            file.writelines(name.lower() + "\n" for _, _, name in rows)
        os.replace(temporary, target)
    except OSError as error:
        return fail(f"Cannot write {args.output}: {error.strerror}.")
    finally:
        # After a success there is nothing left to remove.
        with contextlib.suppress(OSError):
            os.remove(temporary)
    return 0


def fail(sentence):
    print(sentence, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
