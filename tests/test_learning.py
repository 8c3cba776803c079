"""What the models reach, on data/names.txt. All of these train for real, so all are slow."""
import re

import numpy as np
import pytest

import backward
import model
import train

pytestmark = pytest.mark.slow


@pytest.fixture
def learn(tmp_path, monkeypatch, capsys):
    """Run train.py with the given flags; the dev loss that it reports."""
    monkeypatch.chdir(tmp_path)

    def run(flags):
        status = train.main(flags.split())
        return status or float(re.search(r'dev (\d\.\d+)  test', capsys.readouterr().out)[1])
    return run


@pytest.mark.parametrize('flags, most', [
    ('', 2.17),
    ('--hidden 200', 2.11),
    ('--model gpt', 1.95),
    ('--model gpt --layers 1 --steps 3500 --lr 0.006', 2.0)])
def test_the_documented_runs_reach_their_loss(learn, flags, most):
    assert learn(flags) <= most


@pytest.mark.parametrize('norm', model.NORMS)
@pytest.mark.parametrize('act', model.ACTIVATIONS)
def test_every_gpt_is_better_after_2000_steps_than_the_default_mlp(learn, norm, act):
    flags = f'--model gpt --steps 2000 --batch 32 --norm {norm} --act {act} --eval-every 0'
    assert learn(flags) < 2.16


def without_readout(dlogits, x, C, dx, dC, whole=backward.head_backward):
    whole(dlogits, x, C, dx, dC)
    dC[:] = 0


def without_input(demb, X, dC, whole=backward.embedding_backward):
    if len(dC) == 27:                   # the characters' table: positions are fewer, rows more
        whole(demb, X, np.zeros_like(dC))
    else:
        whole(demb, X, dC)


@pytest.mark.parametrize('layer, wrong', [
    ('head_backward', without_readout), ('embedding_backward', without_input)])
def test_only_the_proof_sees_that_a_contribution_to_the_tied_table_is_missing(
        learn, monkeypatch, layer, wrong):
    """The loss falls all the same, on so few characters; dC fails, and no other gradient does."""
    flags = '--model gpt --steps 1000 --batch 32 --eval-every 0'
    right = learn(flags)
    monkeypatch.setattr(backward, layer, wrong)
    loss = learn(flags)
    print(f'dev loss {right:.3f}, with {wrong.__name__} {loss:.3f}')
    assert abs(loss - right) < 0.05
    typed = dict(model='gpt', embd=8, layers=1, heads=2)
    config, _, examples = model.own_examples(typed, model.FLAGS)
    batch = model.gpt_batch(examples, np.arange(3))
    rows = backward.prove_model(config, batch, np.random.default_rng(1), np.dtype('float64'))
    assert [row[0] for row in rows if max(row[2:]) > 1e-7] == ['C']
    assert learn('--model gpt --steps 1 --check') == 2
