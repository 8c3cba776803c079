"""The GPT of this project as a PyTorch module, with the default --norm and --act.

    python tests/gpt_torch.py out/gpt.npz

It loads a checkpoint and gives the same logits, so that you can go on with PyTorch. It prints the
loss of a few words by both.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import model as m
import train

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class GPT(nn.Module):
    def __init__(self, path):
        super().__init__()
        file = np.load(path)
        self.config = json.loads(str(file['config']))
        self.vocabulary = str(file['vocabulary'])
        for name in 'C', 'P', 'gain', 'Wqkv', 'Wo', 'Wup', 'Wdown':
            setattr(self, name, nn.Parameter(torch.tensor(file['best.' + name])))

    def norm(self, x, i):
        return F.rms_norm(x, x.shape[-1:], self.gain[i], eps=1e-5)

    def forward(self, ids):                                  # (names, T), each row begins with 0
        n, T = ids.shape
        E, A = self.C.shape[1], self.config['heads']
        x = self.C[ids] + self.P[:T]                         # (n, T, E)
        for l in range(self.config['layers']):
            qkv = self.norm(x, 2*l) @ self.Wqkv[l]           # (n, T, 3*E)
            q, k, v = (part.view(n, T, A, -1).transpose(1, 2) for part in qkv.split(E, 2))
            ctx = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + ctx.transpose(1, 2).reshape(n, T, E) @ self.Wo[l]
            h = F.gelu(self.norm(x, 2*l + 1) @ self.Wup[l], approximate='tanh')
            x = x + h @ self.Wdown[l]
        return self.norm(x, -1) @ self.C.T                   # (n, T, V)


def main(path):
    gpt, ours = GPT(path), train.load(path).best
    for word in 'emma', 'olivia':
        ids = torch.tensor([[0, *map(gpt.vocabulary.index, word), 0]])
        loss = F.cross_entropy(gpt(ids[:, :-1])[0], ids[0, 1:]).item()
        here = -m.score(ours, word) / (len(word) + 1)
        print(f'{word:<8} loss here {here:.6f}, in PyTorch {loss:.6f}')


if __name__ == '__main__':
    main(sys.argv[1])
