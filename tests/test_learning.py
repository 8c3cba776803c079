"""What the models reach, on data/names.txt. All of these train for real, so all are slow."""
import inspect
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


@pytest.mark.parametrize('contribution, without', [
    ("np.dot(dlogits.T, last, out=g['C'])", "g['C'][:] = 0"),
    ("embedding_backward(dx, tree.X, g['C'])", 'pass')])
def test_only_the_proof_sees_that_a_contribution_to_the_tied_table_is_missing(
        learn, monkeypatch, contribution, without):
    """The loss falls all the same, on so few characters; dC fails, and no other gradient does."""
    flags = '--model gpt --steps 1000 --batch 32 --eval-every 0 --processes 1'
    right = learn(flags)
    source = inspect.getsource(backward.gpt_backward)
    assert source.count(contribution) == 1
    scope = dict(vars(backward))
    exec(source.replace(contribution, without), scope)
    monkeypatch.setattr(backward, 'gpt_backward', scope['gpt_backward'])
    loss = learn(flags)
    print(f'dev loss {right:.4f}, with {without} instead of {contribution} {loss:.4f}')
    assert abs(loss - right) < 0.05
    small, rng = dict(model.GPT_DEFAULTS, embd=8, layers=1, heads=2), np.random.default_rng(1)
    config, batch = model.first_batch(small, 3, rng)
    proven = backward.prove_model(config, batch, np.float64, rng)
    assert proven == [False] + [True] * 8
    assert learn('--model gpt --steps 1 --check') == 2
