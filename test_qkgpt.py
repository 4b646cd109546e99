"""The tests. Oracles: nanoGPT, closed forms, brute force, hand-worked tables, a second run bit for bit.

NANOGPT=path/to/karpathy/nanoGPT (at 3adf61e1) adds the comparison with stock nanoGPT; without it golden
numbers stand in. GPT-2's table (TIKTOKEN_CACHE_DIR) and TinyStories text in ../shared/data add theirs.
"""
import contextlib
import csv
import dataclasses
import fcntl
import hashlib
import http.server
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import platform
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import analyze
import qkgpt

ROOT = Path(__file__).resolve().parent
torch.set_num_threads(1)

# -----------------------------------------------------------------------------
# model

SIZES = [dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=257),
         dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=2048)]


def gpt(seed=0, **config):
    torch.manual_seed(seed)
    return qkgpt.GPT(qkgpt.GPTConfig(**dict(dict(bias=False), **config)))


def random_batch(config, n=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config['vocab_size'], (n, config['block_size'] + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def adamw_losses(model, config, steps):
    optimizer, losses = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu'), []
    for step in range(steps):
        _, loss = model(*random_batch(config, seed=step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.fixture(scope='module')
def nanogpt():
    """Stock nanoGPT's model.py (at 3adf61e1), where the environment variable NANOGPT names a checkout."""
    if 'NANOGPT' not in os.environ:
        pytest.skip('NANOGPT names no checkout of karpathy/nanoGPT')
    spec = importlib.util.spec_from_file_location('nanogpt_model', Path(os.environ['NANOGPT']) / 'model.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize('config', SIZES, ids=['2x32', '4x128'])
@pytest.mark.parametrize('bias', [False, True])
def test_equals_nanogpt_bit_for_bit(nanogpt, config, bias):
    torch.manual_seed(5)
    stock = nanogpt.GPT(nanogpt.GPTConfig(bias=bias, **config))
    off, on = (gpt(seed=5, bias=bias, qknorm=qknorm, **config) for qknorm in (False, True))
    for ours in (off, on):
        assert list(ours.state_dict()) == list(stock.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), stock.state_dict().values()))
        ours.load_state_dict(stock.state_dict(), strict=True)
        stock.load_state_dict(ours.state_dict(), strict=True)
        assert ours.transformer.wte.weight is ours.lm_head.weight
        assert ours.get_num_params() == stock.get_num_params()
    optimizers = [m.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu') for m in (stock, off)]
    for step in range(20):
        x, y = random_batch(config, seed=step)
        outputs = [m(x, y) for m in (stock, off)]
        assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
        for (_, loss), m, optimizer in zip(outputs, (stock, off), optimizers):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(stock.parameters(), off.parameters()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert all(torch.equal(p, q) for p, q in zip(stock.parameters(), off.parameters()))
    assert torch.equal(stock(x)[0], off(x)[0])  # without targets: the last position


# from stock nanoGPT in float64 at SIZES[0]: weights from a formula, 6 AdamW steps on batches from a formula
GOLDEN = {
    False: [5.174798422111216, 8.079531460204658, 5.821364242860119,
            7.314245455339608, 6.621227228387392, 5.481068542789292],
    True: [6.074263928740872, 5.5449755015653155, 5.54372248763274,
           6.102550580181145, 6.328236377616698, 5.674343886567931],
}


def golden_losses(model, config):
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            wave = torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 0.7 + i)
            p.copy_((wave * 0.3 + (p.dim() == 1)).view_as(p))
    optimizer, losses = model.configure_optimizers(0.1, 1e-2, (0.9, 0.95), 'cpu'), []
    for step in range(6):
        ids = (torch.arange(4 * 17) * (step + 3) ** 2 % 257).view(4, 17)
        _, loss = model(ids[:, :-1], ids[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize('bias', [False, True])
def test_golden_numbers_of_nanogpt(bias):
    losses = golden_losses(gpt(bias=bias, **SIZES[0]).double(), SIZES[0])
    assert losses == pytest.approx(GOLDEN[bias], rel=1e-9)


def test_state_dict_has_nanogpts_keys_in_both_arms():
    wanted = ['transformer.wte.weight', 'transformer.wpe.weight']
    for i in range(2):
        wanted += [f'transformer.h.{i}.{name}.weight'
                   for name in ('ln_1', 'attn.c_attn', 'attn.c_proj', 'ln_2', 'mlp.c_fc', 'mlp.c_proj')]
    wanted += ['transformer.ln_f.weight', 'lm_head.weight']
    for qknorm in (False, True):
        assert list(gpt(qknorm=qknorm, **SIZES[0]).state_dict()) == wanted


@pytest.mark.parametrize('scale', [1, 1e3])
def test_qknorm_against_float64_and_its_bound(scale):
    config = SIZES[1]
    model = gpt(qknorm=True, **config)
    attn, hs = model.transformer.h[0].attn, 32
    with torch.no_grad():
        attn.c_attn.weight.mul_(scale)
    x = torch.randn(3, 64, 128, generator=torch.Generator().manual_seed(1)) * 2
    with torch.no_grad():
        q, k, v = attn.qkv(x)
    qkv = x.double().numpy() @ attn.c_attn.weight.detach().double().numpy().T  # (B, T, 3C)
    for found, part, normed in ((q, 0, True), (k, 1, True), (v, 2, False)):
        for h in range(4):
            wanted = qkv[:, :, 128 * part + hs * h:128 * part + hs * (h + 1)]
            if normed:
                wanted = wanted / np.sqrt((wanted ** 2).mean(-1, keepdims=True) + 1e-6)
            atol = 1e-5 * np.abs(wanted).max()
            np.testing.assert_allclose(found[:, h].numpy(), wanted, rtol=1e-4, atol=atol)
    logits = q @ k.transpose(-2, -1) / math.sqrt(hs)
    assert logits.abs().max() <= math.sqrt(hs) * (1 + 1e-5)
    k_same = q @ q.transpose(-2, -1) / math.sqrt(hs)  # the bound is tight: a query that meets itself
    assert k_same.max() == pytest.approx(math.sqrt(hs), rel=1e-3)


def test_qknorm_gradient():
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(qkgpt.rms_norm, x)
    assert qkgpt.rms_norm(torch.zeros(2, 8)).eq(0).all()
    assert qkgpt.rms_norm(torch.full((8,), 1e-3, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_qknorm_is_six_marked_lines():
    code = [line for line in (ROOT / 'qkgpt.py').read_text().splitlines() if line.strip()]
    marked = [line for line in code
              if '# qknorm' in line and 'qknorm: bool' not in line and 'grep' not in line]
    assert len(marked) == 6
    without = inspect.getsource(qkgpt.rms_norm).splitlines()
    assert all(line in marked for line in without)


@pytest.mark.parametrize('qknorm', [False, True])
def test_causality(qknorm):
    config = SIZES[1]
    model = gpt(qknorm=qknorm, **config)
    x, y = random_batch(config)
    later = x.clone()
    later[:, 40:] = (later[:, 40:] + 1) % config['vocab_size']
    before, after = model(x, y)[0], model(later, y)[0]
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


def test_generate_draws_from_the_last_block_size_tokens():
    model = gpt(**SIZES[0])
    torch.manual_seed(0)
    idx = model.generate(torch.zeros((2, 1), dtype=torch.long), 40, top_k=1)
    assert idx.shape == (2, 41)
    assert torch.equal(idx[:, 17], model(idx[:, 1:17])[0][:, -1].argmax(-1))


# -----------------------------------------------------------------------------
# training and log

TINY = ('--dataset toy --device cpu --threads 1 --n_layer 2 --n_head 2 --n_embd 32 --block_size 32 '
        '--batch_size 8 --max_iters 20 --eval_interval 10 --eval_iters 2 --log_interval 5').split()


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp('data'))
    qkgpt.prepare('toy', 257, folder)
    return folder


@pytest.fixture
def run(tmp_path, data_dir, capsys):
    """run('--lr', '1e-2') -> exit status, stdout, stderr of a tiny run into tmp_path."""
    def run(*args, out_dir=tmp_path):
        status = qkgpt.main([*TINY, '--data_dir', data_dir, '--out_dir', str(out_dir), *args])
        return status, *capsys.readouterr()
    return run


def read(path):
    """A log as header, {column: values}, footer, by the csv module: the format as another tool sees it."""
    lines = path.read_text().splitlines()
    rows = list(csv.DictReader(lines[1:-1]))
    columns = {name: np.array([float(row[name] or 'nan') for row in rows]) for name in rows[0]}
    return json.loads(lines[0][2:]), columns, json.loads(lines[-1][2:])


def numbers(path):
    """The part of a log that two equal runs share: all but times and the machine's state."""
    head, columns, last = read(path)
    columns.pop('seconds')
    for name in ('wall_s', 'train_s', 'tokens_per_s', 'peak_memory_mb'):
        last.pop(name)
    return {k: v.tobytes() for k, v in columns.items()}, last, head['config'], head['data']


def test_run_writes_a_log_and_keeps_it(run, tmp_path):
    status, out, err = run('--lr', '1e-2', '--qknorm', '1')
    path = tmp_path / 'L2_lr0.01_qk1_s1337.csv'
    assert status == 0 and err == '' and [p.name for p in tmp_path.iterdir()] == [path.name]
    head, columns, last = read(path)
    assert head['run'] == 'L2_lr0.01_qk1_s1337' and head['config']['qknorm'] is True
    assert head['config']['vocab_size'] == 257
    assert head['code'] == hashlib.sha256((ROOT / 'qkgpt.py').read_bytes()).hexdigest()
    assert socket.gethostname() not in path.read_text()
    assert list(columns['step']) == [0, 5, 10, 15, 20]
    assert list(columns['tokens']) == [0, 1280, 2560, 3840, 5120]
    assert list(np.isnan(columns['val_loss'])) == [False, True, False, True, False]
    assert list(np.isnan(columns['train_loss'])) == [True, False, False, False, False]
    assert last['status'] == 'ok' and last['step'] == 20 and last['diverged_step'] is None
    assert last['initial_val_loss'] == pytest.approx(columns['val_loss'][0])
    assert last['initial_val_loss'] == pytest.approx(math.log(257), rel=0.02)
    assert last['final_val_loss'] == pytest.approx(columns['val_loss'][-1])
    assert last['best_val_loss'] == pytest.approx(np.nanmin(columns['val_loss']))
    assert json.loads(out.splitlines()[-1])['final_val_loss'] == last['final_val_loss']
    assert path.read_text().endswith('}\n')

    before = path.read_bytes()
    status, out, _ = run('--lr', '1e-2', '--qknorm', '1', '--threads', '1')
    assert status == 0 and 'kept' in out and path.read_bytes() == before
    status, _, err = run('--lr', '1e-2', '--qknorm', '1', '--weight_decay', '0.2')
    assert status == 2 and 'weight_decay 0.1 (now 0.2)' in err and err.count('\n') == 1
    assert path.read_bytes() == before
    status, _, _ = run('--lr', '1e-2', '--qknorm', '1', '--weight_decay', '0.2', '--overwrite', '1')
    assert status == 0 and read(path)[0]['config']['weight_decay'] == 0.2
    path.write_text('\n'.join(before.decode().splitlines()[:-1]) + '\n')  # damaged: no closing line
    status, _, err = run('--lr', '1e-2', '--qknorm', '1')
    assert status == 2 and 'not a finished log' in err
    path.unlink()
    path.mkdir()
    status, _, err = run('--lr', '1e-2', '--qknorm', '1', '--overwrite', '1')
    assert status == 2 and err.startswith(f'qkgpt: out_dir: {path}') and path.is_dir()
    assert len(os.listdir(tmp_path)) == 1


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='of glibc')
def test_memory_is_kept_between_steps():
    cfg = qkgpt.Config(n_layer=1, n_head=1, n_embd=32, block_size=128, vocab_size=4096, batch_size=8,
                       device='cpu')
    model, optimizer = qkgpt.build(cfg)
    x, y = random_batch(dict(block_size=128, vocab_size=4096), 8)  # logits of 16 MB, 4096 pages
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        qkgpt.train_step(model, optimizer, 1e-3, [(x, y)], cfg)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(faults[1:]) < 1000, faults


def test_other_code_or_data_is_named(run, tmp_path):
    run()
    path = next(tmp_path.iterdir())
    lines = path.read_text().split('\n')
    for key, replace in (('code', lambda h: h.update(code='0')),
                         ('data', lambda h: h['data'].update(sha256='0'))):
        head = json.loads(lines[0][2:])
        replace(head)
        path.write_text('\n'.join(['# ' + json.dumps(head)] + lines[1:]))
        status, _, err = run()
        assert status == 2 and f'{key} 0 (now' in err


def test_two_runs_are_bit_equal_and_logging_changes_nothing(run, tmp_path):
    outs = [tmp_path / name for name in 'abc']
    run('--lr', '3e-2', out_dir=outs[0])
    run('--lr', '3e-2', out_dir=outs[1])
    run('--lr', '3e-2', '--eval_interval', '3', '--log_interval', '1', out_dir=outs[2])
    a, b, often = (next(out.iterdir()) for out in outs)
    assert numbers(a) == numbers(b)
    first, second = read(a)[1], read(often)[1]
    assert first['val_loss'][-1] == second['val_loss'][-1]
    assert first['max_logit'][-1] == second['max_logit'][-1]
    per_step = dict(zip(second['step'], second['train_loss']))
    for step, loss in zip(first['step'][1:], first['train_loss'][1:]):
        since = [per_step[s] for s in range(int(step) - 4, int(step) + 1)]
        assert loss == pytest.approx(np.mean(since), rel=1e-7)


def config(**values):
    return dataclasses.replace(qkgpt.parse_args(TINY), vocab_size=257, **values)


def test_arms_are_paired_and_cells_share_batches():
    data = np.arange(5000, dtype=np.uint16) % 257
    models = [qkgpt.build(config(qknorm=qknorm, lr=lr))[0] for qknorm in (False, True) for lr in (1e-3, 1e-1)]
    for model in models[1:]:
        assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), model.parameters()))
    a, b = (qkgpt.get_batch(data, torch.Generator().manual_seed(7), config(n_layer=n)) for n in (1, 2))
    assert torch.equal(a[0][0], b[0][0])
    x, y = a[0]
    assert torch.equal(x[:, 1:], y[:, :-1]) and x.shape == (8, 32)


def test_batches_reach_every_window_and_validation_is_fixed():
    data = np.arange(34, dtype=np.uint16)  # 2 windows of 32
    generator = torch.Generator().manual_seed(0)
    starts = {int(row[0]) for _ in range(20) for row in qkgpt.get_batch(data, generator, config())[0][0]}
    assert starts == {0, 1}
    windows = qkgpt.val_windows(np.zeros(1000), config(eval_iters=4))
    assert windows.shape == (4, 8) and windows.min() == 0 and windows.max() + 32 < 1000
    assert np.array_equal(windows, qkgpt.val_windows(np.zeros(1000), config(eval_iters=4, seed=9)))


def test_schedule_is_nanogpts():
    cfg = config(lr=1e-2, min_lr=1e-5, max_iters=1000, warmup_ratio=0.3)
    lrs = [qkgpt.get_lr(it, cfg) for it in range(1000)]
    assert lrs[0] == pytest.approx(1e-2 / 301) and lrs[299] == pytest.approx(1e-2 * 300 / 301)
    assert lrs[300] == 1e-2
    assert lrs[650] == pytest.approx(1e-5 + (1e-2 - 1e-5) / 2) and 1e-5 < lrs[999] < 1.1e-5
    assert max(lrs) == 1e-2 and all(a > b for a, b in zip(lrs[300:], lrs[301:]))
    assert [qkgpt.get_lr(it, config(warmup_ratio=1.0, max_iters=3, lr=4.0)) for it in range(3)] == [1, 2, 3]
    assert qkgpt.get_lr(0, config(warmup_ratio=0.0)) == config().lr


def test_accumulation_gives_the_large_batch():
    data = np.random.default_rng(0).integers(257, size=3000).astype(np.uint16)
    losses = {}
    for n in (1, 4):
        cfg = config(batch_size=8 // n, gradient_accumulation_steps=n)
        model, optimizer = qkgpt.build(cfg)
        generator = torch.Generator().manual_seed(1)
        losses[n] = []
        for _ in range(8):
            batches = qkgpt.get_batch(data, generator, cfg)
            losses[n].append([float(v) for v in qkgpt.train_step(model, optimizer, 1e-2, batches, cfg)])
    np.testing.assert_allclose(losses[1], losses[4], rtol=2e-5)


def test_step_clips_decays_and_uses_the_given_lr():
    data = np.random.default_rng(0).integers(257, size=3000).astype(np.uint16)
    for clip in (0.0, 1e-3):
        cfg = config(grad_clip=clip)
        model, optimizer = qkgpt.build(cfg)
        batches = qkgpt.get_batch(data, torch.Generator().manual_seed(1), cfg)
        model(*batches[0])[1].backward()
        norm = math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
        model.zero_grad()
        grads = {}
        optimizer.register_step_pre_hook(lambda *_: grads.update(
            norm=math.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))))
        _, logged = qkgpt.train_step(model, optimizer, 3e-3, batches, cfg)
        assert float(logged) == pytest.approx(norm, rel=1e-5)
        assert grads['norm'] == pytest.approx(clip or norm, rel=1e-3)
        assert all(group['lr'] == 3e-3 for group in optimizer.param_groups)
    decays = {independent: qkgpt.build(config(lr=1e-2, weight_decay=0.1, independent_wd=independent))[1]
              for independent in (False, True)}
    assert [g['weight_decay'] for g in decays[False].param_groups] == [0.1, 0.0]
    assert [g['weight_decay'] for g in decays[True].param_groups] == [10.0, 0.0]
    assert {p.dim() for p in decays[True].param_groups[1]['params']} == {1}


def test_exactly_max_iters_updates(run, monkeypatch, tmp_path):
    lrs, step = [], qkgpt.train_step
    monkeypatch.setattr(qkgpt, 'train_step', lambda m, o, lr, b, c: lrs.append(lr) or step(m, o, lr, b, c))
    run('--max_iters', '7', '--lr', '1e-2')
    assert len(lrs) == 7 and lrs[0] > 0
    head, columns, _ = read(next(tmp_path.iterdir()))
    assert list(columns['step']) == [0, 5, 7] and not np.isnan(columns['val_loss'][-1])
    assert columns['lr'][-1] == pytest.approx(lrs[-1])


@pytest.mark.parametrize('what', ['loss', 'gradient norm'])
def test_divergence_is_a_result(run, tmp_path, monkeypatch, what):
    step, count = qkgpt.train_step, itertools.count(1)

    def bad_step(*args):
        loss, norm = step(*args)
        if next(count) == 8:
            return (loss * math.nan, norm) if what == 'loss' else (loss, norm * math.inf)
        return loss, norm
    monkeypatch.setattr(qkgpt, 'train_step', bad_step)
    status, out, err = run('--log_interval', '5')
    head, columns, last = read(next(tmp_path.iterdir()))
    assert status == 0 and err == '' and last['status'] == 'diverged'
    assert last['diverged_step'] == last['step'] == 8
    assert last['final_val_loss'] is None and list(columns['step']) == [0, 5, 8] and 'a sample' not in out
    assert last['best_val_loss'] == last['initial_val_loss'] and last['best_step'] == 0
    text = next(tmp_path.iterdir()).read_text()
    assert (',nan,' if what == 'loss' else ',inf,') in text.splitlines()[-2]
    assert run('--log_interval', '5')[0] == 0  # and it is kept


def test_a_run_that_really_diverges(run, tmp_path):
    status, _, _ = run('--lr', '1e20', '--grad_clip', '0', '--warmup_ratio', '0')
    assert status == 0 and read(next(tmp_path.iterdir()))[2]['status'] == 'diverged'


def test_kill_leaves_a_partial_file_and_the_next_start_redoes_it(run, tmp_path):
    run('--lr', '2e-2')
    whole = next(tmp_path.iterdir())
    wanted, partial = numbers(whole), Path(str(whole) + '.partial')
    whole.rename(partial)
    partial.write_text(partial.read_text()[:-300])
    assert run('--lr', '2e-2')[0] == 0
    assert not partial.exists() and numbers(whole) == wanted


def test_second_process_on_a_cell_says_so(run, tmp_path):
    path = tmp_path / 'L2_lr0.001_qk0_s1337.csv'
    with qkgpt.claim(str(path)):
        status, _, err = run()
        assert status == 3 and 'another process' in err and err.count('\n') == 1 and not path.exists()
    assert run()[0] == 0
    assert path.exists()


def test_log_removed_while_running_is_a_failure_and_not_anothers_result(run, tmp_path, monkeypatch):
    path, step = tmp_path / 'L2_lr0.001_qk0_s1337.csv', qkgpt.train_step
    partial = Path(str(path) + '.partial')

    def other(*args):  # another process takes the place of the file that someone removed
        partial.unlink()
        partial.write_text('of another process')
        monkeypatch.setattr(qkgpt, 'train_step', step)
        return step(*args)
    monkeypatch.setattr(qkgpt, 'train_step', other)
    status, _, err = run()
    assert status == 1 and 'removed' in err and not path.exists()
    assert partial.read_text() == 'of another process'


def test_log_finished_by_another_meanwhile_is_kept(run, tmp_path, monkeypatch):
    path, claim = tmp_path / 'L2_lr0.001_qk0_s1337.csv', qkgpt.claim
    monkeypatch.setattr(qkgpt, 'claim', lambda p: path.write_text('just finished') and claim(p))
    assert run()[0] == 3 and path.read_text() == 'just finished' and list(tmp_path.iterdir()) == [path]


def test_failures_are_not_divergence(run, monkeypatch, tmp_path):
    def fail(error):
        def step(*args):
            raise error
        monkeypatch.setattr(qkgpt, 'train_step', step)
        return run()
    for error, word in ((torch.OutOfMemoryError('out of memory'), 'out of memory'),
                        (MemoryError(), 'MemoryError'),
                        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 'out of memory'),
                        (OSError(28, 'No space left on device'), 'No space left')):
        status, _, err = fail(error)
        assert status == 1 and word in err and err.count('\n') == 1
        assert [p.suffix for p in tmp_path.iterdir()] == ['.partial']
    assert fail(KeyboardInterrupt())[0] == 130


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_a_full_disk_is_a_failure(run, monkeypatch):
    monkeypatch.setattr(qkgpt, 'claim', lambda path: open('/dev/full', 'w'))
    status, _, err = run()
    assert status == 1 and 'No space left' in err


# -----------------------------------------------------------------------------
# measurement, against brute force in float64

def brute_force_probe(model, idx):
    """The probes by loops over heads and queries in float64, from the weights alone."""
    P = {name: p.detach().double().numpy() for name, p in model.state_dict().items()}
    cfg, T, hs = model.config, idx.size(1), model.config.n_embd // model.config.n_head

    def layer_norm(x, gain):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred ** 2).mean(-1, keepdims=True) + 1e-5) * gain

    gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))
    x = P['transformer.wte.weight'][idx.numpy()] + P['transformer.wpe.weight'][:T]
    entropies, normed, head_means, logits, sinks, kurts = [], [], [], [], [], []
    for layer in range(cfg.n_layer):
        name = f'transformer.h.{layer}.'
        qkv = layer_norm(x, P[name + 'ln_1.weight']) @ P[name + 'attn.c_attn.weight'].T
        y, layer_logits = np.zeros_like(x), []
        for h in range(cfg.n_head):
            q, k, v = (qkv[..., cfg.n_embd * i + hs * h:cfg.n_embd * i + hs * (h + 1)] for i in range(3))
            if cfg.qknorm:
                q, k = (z / np.sqrt((z ** 2).mean(-1, keepdims=True) + 1e-6) for z in (q, k))
            head = []
            for b in range(idx.size(0)):
                for t in range(T):
                    z = k[b, :t + 1] @ q[b, t] / math.sqrt(hs)
                    a = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
                    y[b, t, hs * h:hs * (h + 1)] = a @ v[b, :t + 1]
                    layer_logits.append(np.abs(z).max())
                    sinks.append(a[0])
                    if t:
                        entropies.append(-sum(p * math.log(p) for p in a if p > 0))
                        head.append(entropies[-1] / math.log(t + 1))
            normed += head
            head_means.append(np.mean(head))
        logits.append(max(layer_logits))
        x = x + y @ P[name + 'attn.c_proj.weight'].T
        hidden = gelu(layer_norm(x, P[name + 'ln_2.weight']) @ P[name + 'mlp.c_fc.weight'].T)
        x = x + hidden @ P[name + 'mlp.c_proj.weight'].T
        kurts.append(((x ** 4).mean(-1) / (x ** 2).mean(-1) ** 2).mean())
    out = layer_norm(x, P['transformer.ln_f.weight']) @ P['lm_head.weight'].T
    return dict(attn_entropy=np.mean(entropies), attn_entropy_norm=np.mean(normed),
                attn_entropy_min=min(head_means), max_logit=max(logits), max_logit_0=logits[0],
                kurtosis=max(kurts), kurtosis_last=kurts[-1],
                sink=np.mean(sinks), log_z=np.log(np.exp(out).sum(-1)).mean())


@pytest.mark.parametrize('qknorm', [False, True])
def test_probe_against_brute_force(qknorm):
    sizes = SIZES[0]
    model = gpt(qknorm=qknorm, **sizes)
    with torch.no_grad():  # far from the initial weights, so that heads, layers and tokens differ
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
            p.mul_(4 if p.dim() > 1 else 1).add_(0.1 * noise)
    idx = random_batch(sizes)[0]
    assert qkgpt.probe(model, idx) == pytest.approx(brute_force_probe(model, idx), rel=1e-4)


def test_attention_stats_in_closed_form():
    T = 16
    max_logit, entropy, per_head, sink = qkgpt.attention_stats(torch.zeros(2, 3, T, T))
    assert entropy == pytest.approx(np.mean([math.log(t) for t in range(2, T + 1)])) and max_logit == 0
    assert per_head.tolist() == pytest.approx([1, 1, 1])
    assert sink == pytest.approx(np.mean([1 / t for t in range(1, T + 1)]))
    logits = torch.zeros(1, 2, T, T)
    logits[0, 1, :, 0] = -1e6  # head 1 never looks at token 1, where it may choose
    logits += torch.ones(T, T).triu(1) * 1e9  # the future does not count
    max_logit, entropy, per_head, sink = qkgpt.attention_stats(logits)
    assert max_logit == 1e6 and per_head[0] == 1
    assert per_head[1] == pytest.approx(np.mean([math.log(t - 1) / math.log(t) for t in range(2, T + 1)]))
    assert sink == pytest.approx((np.mean([1 / t for t in range(1, T + 1)]) + 1 / T) / 2)


def test_kurtosis_in_closed_form():
    x = torch.randn(4, 64, 4096, generator=torch.Generator().manual_seed(0))
    assert qkgpt.kurtosis(x) == pytest.approx(3, abs=0.02)
    assert qkgpt.kurtosis(torch.eye(320)[None] * 1e15) == pytest.approx(320)


def test_validation_loss_perplexity_and_bits_per_byte(data_dir):
    cfg = config(data_dir=data_dir, eval_iters=3)
    _, val, meta = qkgpt.load_data('toy', 257, data_dir, cfg.block_size)
    model = qkgpt.build(cfg)[0]
    found = qkgpt.evaluate(model, val, meta, cfg)
    nll = []
    with torch.no_grad():
        for start in qkgpt.val_windows(val, cfg).flatten():
            ids = torch.from_numpy(val[start:start + 33].astype(np.int64))
            logits = model(ids[None, :-1], ids[None, 1:])[0][0].double()
            nll += (logits.logsumexp(-1) - logits[range(32), ids[1:]]).tolist()
    assert found['val_loss'] == pytest.approx(np.mean(nll), rel=1e-6)
    assert found['val_ppl'] == pytest.approx(math.exp(np.mean(nll)), rel=1e-5)
    n_tokens, n_bytes = len(val), len(qkgpt.decode(val[val < 256], meta).encode())
    assert found['val_bpb'] == pytest.approx(np.mean(nll) / math.log(2) * n_tokens / n_bytes, rel=1e-6)
    assert model.training and qkgpt.perplexity(1e4) == math.exp(700)
    assert math.isnan(qkgpt.perplexity(math.nan))


# -----------------------------------------------------------------------------
# command line

BAD = {
    '--qknorm 2': 'qknorm', '--qknorm yes': 'qknorm', '--n_layer 0': 'n_layer', '--n_layer -1': 'n_layer',
    '--n_layer x': 'n_layer', '--n_head 3': 'n_embd', '--n_head 0': 'n_head', '--n_embd 33': 'n_embd',
    '--block_size 1': 'block_size', '--block_size 1000000': 'block_size', '--vocab_size 256': 'vocab_size',
    '--vocab_size 70000': 'vocab_size', '--dropout 1': 'dropout', '--dropout nan': 'dropout',
    '--lr 0': 'lr', '--lr nan': 'lr', '--lr inf': 'lr', '--lr 1e39': 'lr',
    '--n_embd 100000000000000000000': 'n_embd', '--eval_iters 1000000000000': 'eval_iters',
    '--lr 1e-6': 'lr', '--lr -1': 'lr', '--lr ten': 'lr', '--min_lr -1': 'min_lr', '--min_lr nan': 'min_lr',
    '--weight_decay -1': 'weight_decay', '--weight_decay inf': 'weight_decay',
    '--independent_wd 3': 'independent_wd', '--beta1 1': 'beta1', '--beta2 -0.1': 'beta2',
    '--grad_clip -1': 'grad_clip', '--grad_clip nan': 'grad_clip', '--warmup_ratio 1.5': 'warmup_ratio',
    '--warmup_ratio nan': 'warmup_ratio', '--max_iters 0': 'max_iters', '--max_iters 1e3': 'max_iters',
    '--batch_size 0': 'batch_size', '--gradient_accumulation_steps 0': 'gradient_acc',
    '--eval_interval 0': 'eval_interval', '--eval_iters 0': 'eval_iters',
    '--log_interval 0': 'log_interval', '--seed -1': 'seed', '--seed 1.5': 'seed',
    '--seed 99999999999999999999': 'seed', '--device gpu': 'device', '--device cuda:99': 'device',
    '--dtype float16': 'dtype', '--dtype tf32': 'dtype', '--threads -1': 'threads',
    '--threads 99999': 'threads', '--dataset nope': 'dataset', '--dataset no/such.txt': 'dataset',
    '--dataset /': 'dataset', '--nlayer 2': 'nlayer', '--n_lay 2': 'n_lay', '--lr': 'lr', 'stray': 'stray',
    '--bias 0.5': 'bias', '--compile x': 'compile', '--overwrite 2': 'overwrite',
    '--out_dir /dev/null': 'out_dir', '--out_dir /proc/nope': 'out_dir', '--data_dir /dev/null': 'data_dir',
    '--selftest': 'selftest', '--eval_interval nan': 'eval_interval',
}


@pytest.mark.parametrize('bad', BAD)
def test_bad_input_is_one_line_and_status_2(run, tmp_path, bad):
    status, out, err = run(*bad.split())
    assert status == 2 and err.count('\n') == 1 and err.startswith('qkgpt: ') and BAD[bad] in err
    assert 'Traceback' not in err
    assert list(tmp_path.iterdir()) == []


def test_both_spellings_of_a_flag_and_help():
    wanted = dataclasses.replace(qkgpt.Config(), lr=0.03, qknorm=True)
    assert qkgpt.parse_args(['--lr=3e-2', '--qknorm', '1']) == wanted
    command = [sys.executable, 'qkgpt.py', '--help']
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    for field in dataclasses.fields(qkgpt.Config):
        assert f'--{field.name} ' in text
    assert '[0.3]' in text


def test_paper_cell_has_the_designs_size():
    for n, millions in ((6, 10.0), (8, 12.5), (10, 15.0)):
        model = gpt(n_layer=n, n_head=5, n_embd=320, block_size=256, vocab_size=8192)
        assert model.get_num_params(False) / 1e6 == pytest.approx(millions, abs=0.1)
    cfg = qkgpt.Config()
    assert (cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.block_size) == (8, 5, 320, 256)
    assert cfg.max_iters * cfg.batch_size * cfg.block_size == 16_384_000


def test_dry_run_writes_nothing(run, tmp_path):
    status, out, err = run('--dry_run', '1')
    assert status == 0 and list(tmp_path.iterdir()) == [] and err == ''
    summary = json.loads(out.splitlines()[-1])
    assert summary['run'] == 'L2_lr0.001_qk0_s1337' and summary['estimated_s'] > 0
    assert summary['tokens'] == 5120
    # by hand: 6 flops per parameter and token, 12 per layer, width and position in the attention
    params = 257 * 32 + 2 * (2 * 32 + 12 * 32 * 32) + 32
    assert summary['n_params'] == params + 32 * 32 and summary['n_params_nonemb'] == params - 257 * 32
    assert summary['flops'] == 5120 * (6 * params + 12 * 2 * 32 * 32)


def test_prepare_prints_what_the_sweep_reads(run, data_dir):
    status, out, _ = run('--prepare', '1')
    found = dict(line.split(' ') for line in out.splitlines())
    assert status == 0 and found['device'] == 'cpu' and found['code'] == qkgpt.sha256_file(qkgpt.__file__)
    assert found['data'] == qkgpt.load_data('toy', 0, data_dir, 32)[2]['sha256']


def test_selftest_passes_and_fails(run, monkeypatch):
    status, out, _ = run('--selftest', '1', '--dropout', '0.5', '--lr', '1e-6', '--min_lr', '0',
                         '--grad_clip', '1e-9')
    assert status == 0 and 'FAILED' not in out and out.count('ok  ') == 12 and 'raises an error' in out
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(qkgpt.F, 'scaled_dot_product_attention',  # a mask that leaks
                        lambda q, k, v, dropout_p, is_causal: attention(q, k, v, is_causal=False))
    status, out, _ = run('--selftest', '1')
    assert status == 1 and re.search('FAILED.*causality', out)


def test_unwritable_out_dir_is_noticed_before_the_data(run, tmp_path, monkeypatch):
    monkeypatch.setattr(qkgpt.os, 'access', lambda path, mode: path != str(tmp_path))
    status, _, err = run('--data_dir', str(tmp_path / 'data'), out_dir=tmp_path / 'new' / 'runs')
    assert status == 2 and err.startswith('qkgpt: out_dir') and not list(tmp_path.iterdir())


def test_sample_that_stdout_cannot_encode_and_closed_stdout(tmp_path, data_dir):
    command = [sys.executable, 'qkgpt.py', *TINY, '--max_iters', '2', '--data_dir', data_dir,
               '--out_dir', str(tmp_path)]
    for seed, shell in (('4', 'exec "$@"'), ('5', 'exec "$@" >&-')):
        done = subprocess.run(['sh', '-c', shell, 'sh', *command, '--seed', seed], cwd=ROOT,
                              capture_output=True, text=True, env=dict(os.environ, PYTHONIOENCODING='ascii'))
        assert done.returncode == 0 and done.stderr == ''


def test_bfloat16_autocast_is_logged(run, tmp_path):
    status, _, _ = run('--dtype', 'bfloat16', '--qknorm', '1')
    head, columns, _ = read(next(tmp_path.iterdir()))
    assert status == 0 and head['dtype'] == 'bfloat16 (autocast)' and columns['val_loss'][-1] < 5.55


# -----------------------------------------------------------------------------
# data

SHARED = ROOT.parent / 'shared' / 'data'
RAW = SHARED / 'raw' / 'TinyStoriesV2-GPT4-valid.first5242880bytes.txt'
if 'TIKTOKEN_CACHE_DIR' not in os.environ and (SHARED / 'tiktoken_cache').exists():
    os.environ['TIKTOKEN_CACHE_DIR'] = str(SHARED / 'tiktoken_cache')
needs_gpt2 = pytest.mark.skipif('TIKTOKEN_CACHE_DIR' not in os.environ, reason='GPT-2\'s BPE is not at hand')
needs_raw = pytest.mark.skipif(not RAW.exists(), reason='no TinyStories text at hand')

QUIRKS = ('“Don’t!” said the café owner — naïve.\tA tab, two  spaces.\n\n\n  Indented. 🙂👩‍👧 '
          '日本 \u00a0 x\u200by \U0001f1e6 it\'s 1234567 <|endoftext> |>')
STORIES = [f'Story {i}. {QUIRKS} The end of {i}.' for i in range(40)]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def write_stories(path, stories=STORIES):
    path.write_text(''.join(f'\n{story}\n{qkgpt.END}\n' for story in stories), encoding='utf-8')
    return str(path)


def fails_with(*words):
    return pytest.raises(qkgpt.UsageError, match='(?s)' + '.*'.join(words))


# -----------------------------------------------------------------------------
# download: a local server that misbehaves as told

BODY = bytes(np.random.default_rng(0).integers(0, 256, 300_000, np.uint8))


class Handler(http.server.BaseHTTPRequestHandler):
    """self.server.script holds one behaviour per request, the last for all that follow."""

    def do_GET(self):
        script, log = self.server.script, self.server.log
        do = script.pop(0) if len(script) > 1 else script[0]
        log.append(self.headers['Range'])
        if do == 'redirect':
            self.send_response(302)
            self.send_header('Location', '/elsewhere')
            self.end_headers()
            return
        if isinstance(do, int):
            self.send_response(do)
            if do == 429:
                self.send_header('Retry-After', '7')
            self.send_header('Content-Length', '0')
            self.end_headers()
            return
        body = {'wrong': BODY[::-1], 'short': BODY[:1000], 'html': b'<html>log in</html>' * 9}.get(do, BODY)
        start, stop = map(int, self.headers['Range'].removeprefix('bytes=').split('-'))
        if do in ('ignore', 'ignore-cut', 'html', 'short'):
            self.send_response(200)
            start, stop = 0, len(body) - 1
        else:
            self.send_response(206)
        piece = body[start:stop + 1]
        self.send_header('Content-Type', 'text/html; charset=utf-8' if do == 'html' else 'text/plain')
        self.send_header('Content-Length', str(len(piece)))
        self.end_headers()
        self.wfile.write(piece[:100_000] if do in ('cut', 'ignore-cut') else piece)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch, tmp_path):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.log, server.slept = [], []
    monkeypatch.setattr(qkgpt.time, 'sleep', server.slept.append)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    server.path = tmp_path / 'raw.txt'
    server.part = tmp_path / 'raw.txt.part'

    def get(*script, size=len(BODY), digest=None):
        server.script = list(script)
        url = f'http://127.0.0.1:{server.server_port}/x'
        qkgpt.download(url, str(server.path), size, digest or sha256(BODY[:size]))
        assert server.path.read_bytes() == BODY[:size] and not server.part.exists()

    server.get = get
    yield server
    server.shutdown()
    server.server_close()


def test_data_download_resumes_where_the_connection_was_cut(server):
    server.get('cut')  # every answer stops after 100,000 bytes
    assert server.log == ['bytes=0-299999', 'bytes=100000-299999', 'bytes=200000-299999']


def test_data_download_goes_on_from_an_earlier_start(server):
    server.part.write_bytes(BODY[:123])
    server.get('ok')
    assert server.log == ['bytes=123-299999']


def test_data_download_asks_for_the_range_after_a_redirect(server):
    server.part.write_bytes(BODY[:123])
    server.get('redirect', 'ok')
    assert server.log == ['bytes=123-299999'] * 2


def test_data_download_of_the_first_bytes_only(server):
    server.get('ok', size=5000)
    assert server.log == ['bytes=0-4999']
    server.path.unlink()
    server.get('ignore', size=5000)  # sends all 300,000


def test_data_download_starts_over_if_ranges_are_ignored(server):
    server.part.write_bytes(b'x' * 123)
    server.get('ignore-cut', 'ignore')
    assert len(server.log) == 2


def test_data_download_backs_off(server):
    server.get(429, 503, 500, 'cut', 503, 'ok')
    assert server.slept == [7, 2, 4, 1, 1]


def test_data_download_gives_up(server):
    with fails_with('dataset: http', 'HTTP 503', 'save the file as'):
        server.get(503)
    assert len(server.log) == 6 and server.slept == [1, 2, 4, 8, 16]
    server.script, server.log[:] = [404], []
    with fails_with('dataset: http', 'HTTP 404'):
        server.get(404)
    assert len(server.log) == 1 and not server.path.exists()


def test_data_download_without_a_server(tmp_path, monkeypatch):
    monkeypatch.setattr(qkgpt.time, 'sleep', lambda s: None)
    with fails_with('dataset: http', 'no connection'):
        qkgpt.download('http://127.0.0.1:9/x', str(tmp_path / 'x'), 10, '0' * 64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('script, words', [
    ('wrong', ('not the published file', 'sha256')),
    ('short', ('not the published file', '1000 bytes, not 300000')),
    ('html', ('web page',)), (416, ('HTTP 416',))])
def test_data_download_of_a_wrong_file(server, script, words):
    if script == 416:
        server.part.write_bytes(BODY[:123])
    with fails_with('dataset: http', *words):
        server.get(script)
    assert not server.path.exists() and not server.part.exists() and len(server.log) == 1


def test_data_a_web_page_leaves_what_has_come(server):
    server.part.write_bytes(BODY[:123])
    with fails_with('web page'):
        server.get('html')
    server.get('ok')
    assert server.log[-1] == 'bytes=123-299999'


def test_data_raw_text_is_downloaded_once_or_found(server, tmp_path, monkeypatch):
    text = ('tail of a story' + qkgpt.END + qkgpt.END.join(STORIES) + qkgpt.END + 'head of').encode()
    monkeypatch.setattr(sys.modules[__name__], 'BODY', text)
    source = dict(file='raw.txt', url='x', size=len(text), cut=(1, 1), sha256=sha256(text))
    monkeypatch.setitem(qkgpt.DATASETS, 'net', dict(vocab_size=257, sources=[source]))
    monkeypatch.setattr(qkgpt, 'BASE_URL', f'http://127.0.0.1:{server.server_port}/')
    server.script = ['ok']
    for _ in range(2):
        _, _, meta = qkgpt.load_data('net', 0, str(tmp_path), 8)
    assert (meta['train']['stories'], meta['val']['stories']) == (36, 4) and len(server.log) == 1
    assert (tmp_path / 'raw' / 'raw.txt').read_bytes() == text
    shutil.rmtree(tmp_path / 'net_257')
    qkgpt.load_data('net', 0, str(tmp_path), 8)
    assert len(server.log) == 1
    shutil.rmtree(tmp_path / 'net_257')
    (tmp_path / 'raw' / 'raw.txt').write_bytes(text[:-1])
    with fails_with('dataset: .*raw.txt: missing, or not of sha256'):
        qkgpt.load_data('net', 0, str(tmp_path), 8)


# -----------------------------------------------------------------------------
# tokenizer

VOCABS = [257] + [pytest.param(v, marks=needs_gpt2) for v in (258, 2048, 8192, 50257)]


@pytest.mark.parametrize('vocab_size', VOCABS)
def test_data_tokenizer_is_lossless(vocab_size):
    encode, itos = qkgpt.get_tokenizer(vocab_size)
    text = RAW.read_bytes()[:200_000].decode(errors='ignore').split(qkgpt.END) if RAW.exists() else []
    stories = STORIES + [''.join(map(chr, range(0xd800)))] + text  # every character of the first 55,296
    ids = encode(stories)
    assert ids.dtype == np.uint16 and len(itos) == vocab_size and ids.max() == vocab_size - 1
    pieces = np.split(ids, np.flatnonzero(ids == vocab_size - 1) + 1)
    assert [b''.join(itos[i] for i in piece[:-1]).decode() for piece in pieces[:-1]] == stories
    meta = dict(itos=[token.decode('latin-1') for token in itos])
    assert qkgpt.decode(pieces[0], meta) == stories[0] + qkgpt.END
    assert qkgpt.decode(encode(['é'])[:-1][:1], meta) in ('é', '\ufffd')


def test_data_bytes_are_ids():
    encode, _ = qkgpt.get_tokenizer(257)
    assert encode(['aé', '']).tolist() == [97, 0xc3, 0xa9, 256, 256]


@needs_gpt2
@pytest.mark.parametrize('vocab_size', [300, 2048, 50257])
def test_data_tokenizer_equals_byte_pair_encoding_by_hand(vocab_size):
    """Greedy merging by rank of each word, written down plainly, is what tiktoken does with the cut table."""
    import tiktoken
    ranks = {b: r for b, r in tiktoken.get_encoding('gpt2')._mergeable_ranks.items() if r < vocab_size - 1}
    encode, _ = qkgpt.get_tokenizer(vocab_size)
    for word in ('hello', ' stories', ' beautifully', '“', ' 🙂', '\t', ' once'):
        parts = [bytes([b]) for b in word.encode()]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:]))
                        if a + b in ranks]:
            i = min(pairs)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        assert encode([word]).tolist() == [ranks[p] for p in parts] + [vocab_size - 1], word


@needs_gpt2
def test_data_tokenizer_is_gpt2_at_full_size():
    import tiktoken
    gpt2, (encode, itos) = tiktoken.get_encoding('gpt2'), qkgpt.get_tokenizer(50257)
    expected = [i for story in STORIES for i in gpt2.encode_ordinary(story) + [gpt2.eot_token]]
    assert encode(STORIES).tolist() == expected
    assert itos == [gpt2.decode_single_token_bytes(i) for i in range(50257)]


@needs_gpt2
def test_data_every_merge_joins_lower_ranks():
    _, itos = qkgpt.get_tokenizer(50257)
    ranks = {token: rank for rank, token in enumerate(itos[:-1])}
    assert sorted(itos[:256]) == [bytes([i]) for i in range(256)]
    for token, rank in ranks.items():
        if rank >= 256:
            assert any(max(ranks.get(token[:i], rank), ranks.get(token[i:], rank)) < rank
                       for i in range(1, len(token))), token


def test_data_tiktoken_is_only_needed_to_prepare_bpe(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tiktoken', None)
    qkgpt.load_data('toy', 0, str(tmp_path), 64)
    with fails_with('vocab_size: 2048: 257', 'tiktoken'):
        qkgpt.prepare('toy', 2048, str(tmp_path))


def test_data_gpt2_files_out_of_reach(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip('tiktoken')

    def no_network(name):
        raise ConnectionError
    monkeypatch.setattr(tiktoken, 'get_encoding', no_network)
    with fails_with('vocab_size: 2048: 257', 'TIKTOKEN_CACHE_DIR'):
        qkgpt.prepare('toy', 2048, str(tmp_path / 'new'))
    assert not (tmp_path / 'new').exists()


# -----------------------------------------------------------------------------
# prepared data

def test_data_toy_generator_reproduces_the_file():
    spec = importlib.util.spec_from_file_location('make_toy_stories', ROOT / 'data' / 'make_toy_stories.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    data = (ROOT / 'data' / 'toy_stories.txt').read_bytes()
    assert module.make_text().encode() == data
    assert sha256(data) == qkgpt.DATASETS['toy']['sources'][0]['sha256']


def test_data_toy(tmp_path):
    train, val, meta = qkgpt.load_data('toy', 0, str(tmp_path), 64)
    text = (ROOT / 'data' / 'toy_stories.txt').read_text()
    assert qkgpt.decode(train, meta) + qkgpt.decode(val, meta) == text.replace(f'\n{qkgpt.END}\n', qkgpt.END)
    assert (meta['train']['stories'], meta['val']['stories']) == (1890, 210)
    assert (len(train), len(val)) == (meta['train']['tokens'], meta['val']['tokens'])
    assert train.dtype == np.uint16 and isinstance(train, np.memmap)


@needs_raw
@pytest.mark.parametrize('vocab_size, train_tokens, val_tokens', [
    (257, 4635000, 514081), pytest.param(2048, 1597573, 177494, marks=needs_gpt2),
    pytest.param(8192, 1285208, 142958, marks=needs_gpt2)])
def test_data_tinystories_5m(vocab_size, train_tokens, val_tokens, tmp_path):
    (tmp_path / 'raw').mkdir()
    (tmp_path / 'raw' / RAW.name).symlink_to(RAW)
    train, val, meta = qkgpt.load_data('tinystories-5m', vocab_size, str(tmp_path), 256)
    stories = [s.strip() for s in RAW.read_text('utf-8').split('\n<|endoftext|>\n')[1:-1]]
    assert (len(stories), meta['train']['stories'], meta['val']['stories']) == (6456, 5811, 645)
    assert (len(train), len(val)) == (train_tokens, val_tokens)
    for ids, part, own in ((train, 'train', stories[:5811]), (val, 'val', stories[5811:])):
        assert qkgpt.decode(ids, meta) == ''.join(story + qkgpt.END for story in own)
        assert meta[part]['bytes'] == sum(len(story.encode()) for story in own)
    if vocab_size > 257:
        import tiktoken
        gpt2 = tiktoken.get_encoding('gpt2')
        ranks = {b: r for b, r in gpt2._mergeable_ranks.items() if r < vocab_size - 1}
        bpe = tiktoken.Encoding('cut', pat_str=gpt2._pat_str, mergeable_ranks=ranks, special_tokens={})
        expected = [i for story in stories[5811:] for i in bpe.encode_ordinary(story) + [vocab_size - 1]]
        assert val.tolist() == expected


def test_data_meta(tmp_path):
    path = write_stories(tmp_path / 'own.txt')
    train, val, meta = qkgpt.load_data(path, 0, str(tmp_path), 8)
    folder = tmp_path / f'own-{sha256(Path(path).read_bytes())[:8]}_257'
    assert sorted(os.listdir(folder)) == ['meta.json', 'train.bin', 'val.bin']
    stored = json.loads((folder / 'meta.json').read_text())
    assert stored == meta and (meta['dataset'], meta['vocab_size'], meta['tokenizer']) == (path, 257, 'bytes')
    assert meta['source'] == [sha256(Path(path).read_bytes())]
    for part, own in (('train', STORIES[:36]), ('val', STORIES[36:])):
        data = b''.join(story.strip().encode() + b'\xff' for story in own)
        ids = [256 if b == 0xff else b for b in data]
        assert (folder / f'{part}.bin').read_bytes() == np.array(ids, '<u2').tobytes()
        assert meta[part] == dict(stories=len(own), tokens=len(ids), bytes=len(ids) - len(own),
                                  sha256=sha256(np.array(ids, '<u2').tobytes()))
    write_stories(tmp_path / 'own.txt', STORIES[1:])  # an edited text is another data set
    assert qkgpt.load_data(path, 0, str(tmp_path), 8)[2]['sha256'] != meta['sha256']


@pytest.mark.parametrize('text, cut, expected', [
    ('a<|endoftext|>b<|endoftext|>c', (0, 0), ['a', 'b', 'c']),
    ('a<|endoftext|>b<|endoftext|>c', (1, 1), ['b']),
    ('a<|endoftext|>b<|endoftext|>\n', (1, 0), ['b']),
    ('a', (0, 0), ['a']), ('a', (1, 0), []), ('a', (0, 1), []), ('', (0, 0), []),
    ('\n\na \r\n\tb\n<|endoftext|>\r\n<|endoftext|> \n\n<|endoftext|>\nc\rd\n', (0, 0), ['a \n\tb', 'c\nd']),
    ('x' * (5 << 20) + '<|endoftext|>y' * 3, (1, 0), ['y'] * 3)])  # the first end is not in the first piece
def test_data_read_stories(text, cut, expected, tmp_path):
    (tmp_path / 'text').write_bytes(text.encode())
    assert list(qkgpt.read_stories(str(tmp_path / 'text'), *cut)) == expected


def test_data_read_stories_across_pieces(tmp_path):
    """Separators and multi-byte characters may straddle the pieces in which the text is read."""
    for shift in range(16):
        text = 'é' * ((1 << 22) - shift) + qkgpt.END + 'ö'
        (tmp_path / 'text').write_text(text, encoding='utf-8')
        assert [len(s) for s in qkgpt.read_stories(str(tmp_path / 'text'), 0, 0)] == [(1 << 22) - shift, 1]


def test_data_text_without_separator_is_cut_at_nine_tenths(tmp_path):
    (tmp_path / 'one.txt').write_text('0123456789' * 50)
    train, val, meta = qkgpt.load_data(str(tmp_path / 'one.txt'), 0, str(tmp_path), 8)
    assert qkgpt.decode(train, meta) == '0123456789' * 45 + qkgpt.END
    assert qkgpt.decode(val, meta) == '0123456789' * 5 + qkgpt.END


def test_data_few_stories_leave_one_for_validation(tmp_path):
    _, val, meta = qkgpt.load_data(write_stories(tmp_path / 'three.txt', STORIES[:3]), 0, str(tmp_path), 8)
    assert (meta['train']['stories'], meta['val']['stories']) == (2, 1)
    assert qkgpt.decode(val, meta) == STORIES[2] + qkgpt.END


def test_data_prepared_data_are_used_as_they_are(tmp_path, monkeypatch):
    path = write_stories(tmp_path / 'own.txt')
    folder = qkgpt.prepare(path, 0, str(tmp_path))
    monkeypatch.setattr(qkgpt, 'get_tokenizer', None)  # neither it nor a place to write is needed any more
    (tmp_path / '.lock').unlink()
    assert qkgpt.prepare(path, 257, str(tmp_path)) == folder and not (tmp_path / '.lock').exists()


def test_data_every_story_has_its_end(tmp_path):
    with pytest.raises(RuntimeError, match='not one end-of-text id per story'):
        qkgpt.write_tokens(str(tmp_path / 'x'), ['a', 'b'],
                           lambda stories: np.array([1, 256], np.uint16), 257)


def test_data_default_vocabularies():
    own = {name: qkgpt.get_dataset(name, 0, 'd')[1:] for name in qkgpt.DATASETS}
    assert own == {'tinystories': (8192, 'd/tinystories_8192'), 'toy': (257, 'd/toy_257'),
                   'tinystories-5m': (2048, 'd/tinystories-5m_2048')}


def test_data_batches_lose_nothing():
    stories = [str(i) * (i % 7) for i in range(100)]
    lists = list(qkgpt.batches(iter(stories), 50))
    assert sum(lists, []) == stories and all(50 <= sum(map(len, b)) < 50 + 12 for b in lists[:-1])


def test_data_two_processes_at_once_and_kill(tmp_path):
    """A process killed in mid-preparation leaves no folder; then two at once make it once and agree."""
    write_stories(tmp_path / 'own.txt', STORIES * 2000)
    code = ('import sys; sys.path[:0] = [sys.argv[1]]; import {} as qkgpt; '
            'print(qkgpt.load_data("own.txt", 0, "data", 8)[2]["sha256"])').format(qkgpt.__name__)

    def start():
        return subprocess.Popen([sys.executable, '-c', code, os.path.dirname(qkgpt.__file__)], cwd=tmp_path,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    victim = start()
    while not list(tmp_path.glob('data/*.partial')):
        assert victim.poll() is None
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert [p.suffix for p in tmp_path.glob('data/own*')] == ['.partial']
    both = [start(), start()]
    (a, err_a), (b, err_b) = [process.communicate() for process in both]
    assert a == b and len(a) == 65 and sorted(['stories,' in err_a, 'stories,' in err_b]) == [False, True]
    assert [p.suffix for p in tmp_path.glob('data/own*')] == ['']


# -----------------------------------------------------------------------------
# bad input

def test_data_bad_names_and_sizes(tmp_path):
    data_dir = str(tmp_path / 'new')
    with fails_with('dataset: tiny: one of tinystories, tinystories-5m, toy'):
        qkgpt.prepare('tiny', 0, data_dir)
    with fails_with('dataset: nowhere.txt: a text file', 'No such file'):
        qkgpt.prepare('nowhere.txt', 0, data_dir)
    with fails_with('dataset: .*: a text file', 'Is a directory'):
        qkgpt.prepare(str(tmp_path), 0, data_dir)
    for vocab_size in (-1, 1, 256, 50258, 65536):
        with fails_with(f'vocab_size: {vocab_size}: from 257 .* to 50257'):
            qkgpt.prepare('toy', vocab_size, data_dir)
    assert not os.path.exists(data_dir)
    (tmp_path / 'file').write_text('')
    with fails_with('data_dir: .*file: a folder that can be written'):
        qkgpt.prepare('toy', 0, str(tmp_path / 'file'))


@pytest.mark.parametrize('content, words', [
    (b'', 'not empty'), (b' \n<|endoftext|>\n', 'not empty'), (b'caf\xe9', 'UTF-8'),
    (b'a' * 99, 'block_size: 64')])
def test_data_bad_text(content, words, tmp_path):
    (tmp_path / 'bad.txt').write_bytes(content)
    with fails_with(words):
        qkgpt.load_data(str(tmp_path / 'bad.txt'), 0, str(tmp_path), 64)
    assert not list(tmp_path.glob('*.partial'))


def test_data_length_needed_is_block_size_plus_two(tmp_path):
    path = write_stories(tmp_path / 'own.txt')
    n = len(qkgpt.load_data(path, 0, str(tmp_path), 8)[1])
    qkgpt.load_data(path, 0, str(tmp_path), n - 2)
    with fails_with(f'block_size: {n - 1}: below {n - 1}'):
        qkgpt.load_data(path, 0, str(tmp_path), n - 1)


def damage_json(key, value):
    def damage(folder):
        meta = json.loads((folder / 'meta.json').read_text())
        meta[key] = value(meta[key])
        (folder / 'meta.json').write_text(json.dumps(meta))
    return damage


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize('damage, words', [
    (lambda f: (f / 'meta.json').unlink(), 'meta.json: missing or damaged'),
    (lambda f: os.truncate(f / 'meta.json', 100), 'meta.json: missing or damaged'),
    (lambda f: (f / 'meta.json').write_text('[]'), 'meta.json: missing or damaged'),
    (damage_json('itos', lambda v: v[::-1]), 'meta.json: missing or damaged'),
    (damage_json('val', lambda v: dict(v, bytes=1)), 'meta.json: missing or damaged'),
    (damage_json('source', lambda v: ['0' * 64]), 'meta.json: made from another text'),
    (lambda f: (f / 'val.bin').unlink(), 'val.bin: missing'),
    (lambda f: os.truncate(f / 'train.bin', 1000), 'train.bin: damaged, 1000 bytes, not'),
    (lambda f: flip(f / 'train.bin', 500), 'train.bin: damaged, its sha256')])
def test_data_damage_is_found(damage, words, tmp_path):
    path = write_stories(tmp_path / 'own.txt')
    folder = Path(qkgpt.prepare(path, 0, str(tmp_path)))
    damage(folder)
    with fails_with('data_dir: .*' + words, f'delete .*{folder.name}'):
        qkgpt.load_data(path, 0, str(tmp_path), 8)
    shutil.rmtree(folder)
    qkgpt.load_data(path, 0, str(tmp_path), 8)


def test_data_ids_must_be_in_the_vocabulary(tmp_path):
    path = write_stories(tmp_path / 'own.txt')
    folder = Path(qkgpt.prepare(path, 0, str(tmp_path)))
    meta = json.loads((folder / 'meta.json').read_text())
    ids = np.fromfile(folder / 'val.bin', '<u2')
    ids[7] = 257
    ids.tofile(folder / 'val.bin')
    meta['val']['sha256'] = sha256(ids.tobytes())
    meta['sha256'] = qkgpt.content_sha256(meta)
    (folder / 'meta.json').write_text(json.dumps(meta))
    with fails_with('val.bin: holds id 257, not below vocab_size 257'):
        qkgpt.load_data(path, 0, str(tmp_path), 8)


# -----------------------------------------------------------------------------
# the sweep

TRAINER = r'''
import fcntl, hashlib, json, os, sys, time
flags = dict(zip((a.lstrip("-") for a in sys.argv[1::2]), sys.argv[2::2]))
with open("calls", "a") as f:
    f.write(" ".join(sys.argv[1:]) + "\n")
if "prepare" in flags:
    device = os.environ.get("MACHINE", "cpu") if flags["device"] == "auto" else flags["device"]
    print("code " + hashlib.sha256(open(__file__, "rb").read()).hexdigest() + "\ndata d1\ndevice " + device)
    sys.exit()
if "selftest" in flags:
    sys.exit(os.environ.get("SELFTEST"))
if "dry_run" in flags:
    "UNTIMED" in os.environ and sys.exit("no time")
    sys.exit(print(json.dumps({"estimated_s": 100 * int(flags["n_layer"])})))
run = "L{n_layer}_lr{0:g}_qk{qknorm}_s{seed}".format(float(flags["lr"]), **flags)
log = flags["out_dir"] + "/" + run + ".csv"
partial = open(log + ".partial", "a")
try:
    fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(print(run + ": another process is running it", file=sys.stderr) or 3)
if os.path.exists(log):  # complete since: perhaps even the file opened above, renamed
    os.path.exists(log + ".partial") and os.remove(log + ".partial")
    sys.exit()
partial.truncate(0)
open("started", "a").write("+" + run + "\n")
for step in range(10):
    partial.write("%d,%s\n" % (step, float(flags["lr"]) / (step + 1)))
    partial.flush()
    time.sleep(float(os.environ.get("PAUSE", 0)) / 10)
if run == os.environ.get("FAILS"):
    sys.exit("first line\n" + run + ": out of memory")
ok = run != os.environ.get("DIVERGES")
partial.write("# " + json.dumps({"status": "ok" if ok else "diverged", "diverged_step": None if ok else 7,
                                 "final_val_loss": 1.25 if ok else None, "wall_s": 60.0}) + "\n")
partial.flush()
open("started", "a").write("-" + run + "\n")
print("a story of bytes \0")
os.rename(log + ".partial", log)
'''
GRID = {'STUDY': 'tiny', 'LRS': '1e-3 .1', 'DEPTHS': '1 2', 'SEEDS': '7 8'}
RUNS = [f'L{depth}_lr{lr}_qk{arm}_s{seed}' for seed in (7, 8) for depth in (1, 2) for lr in ('0.001', '0.1')
        for arm in (0, 1)]


@pytest.fixture
def project(tmp_path):
    """A copy of the project with the stand-in, in a folder with a name that breaks careless quoting."""
    folder = tmp_path / "it's a \"$HOME\" copy"
    folder.mkdir()
    for name in ('sweep.sh', 'seeds.txt', 'requirements.txt'):
        shutil.copy(ROOT / name, folder)
    (folder / 'qkgpt.py').write_text(TRAINER)
    (folder / 'analyze.py').write_text("import sys\nprint('analyzed', *sys.argv[1:])\n")
    return folder


def environment(changes):
    own = ('JOBS', 'STUDY', 'LRS', 'DEPTHS', 'SEEDS', 'MAX_ITERS', 'DEVICE', 'ARGS')
    inherited = {k: v for k, v in os.environ.items() if k not in own and 'SLURM' not in k}
    return {**inherited, 'PYTHON': sys.executable, **changes}


def heed_signals():
    """What a shell starts in the background ignores Ctrl-C, and so would the sweeps of tests run there."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def start_sweep(project, *options, **changes):
    return subprocess.Popen(['bash', 'sweep.sh', *options], cwd=project, env=environment(changes), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=heed_signals)


def run_sweep(project, *options, **changes):
    process = start_sweep(project, *options, **changes)
    process.stdout_text, process.stderr_text = process.communicate(timeout=120)
    return process


def complete(project, study='tiny'):
    return {path.stem: path.read_text() for path in (project / 'logs' / study).glob('*.csv')}


def calls(project):
    path = project / 'calls'
    return path.read_text().splitlines() if path.exists() else []


def refused(process, *words):
    """Bad input: exit status 2, one line, which has the words."""
    assert process.returncode == 2
    assert process.stderr_text.count('\n') == 1
    assert all(word in process.stderr_text for word in words), process.stderr_text


def wait_for(condition, seconds=20):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, 'waited in vain'
        time.sleep(0.02)


def test_sweep_list_is_the_grid_in_order_and_does_nothing_else(project):
    before = sorted(project.rglob('*'))
    done = run_sweep(project, '--list', **GRID)
    lines = done.stdout_text.splitlines()
    assert done.returncode == 0 and sorted(project.rglob('*')) == before
    flags = [dict(re.findall(r'--(\w+) (\S+)', line)) for line in lines]
    assert ['L{n_layer}_lr{lr}_qk{qknorm}_s{seed}'.format(**f) for f in flags] == RUNS
    assert {f['out_dir'] for f in flags} == {'logs/tiny'}
    subprocess.run(['bash', '-c', f'mkdir -p logs/tiny; {lines[3]}'], cwd=project, check=True)
    assert list(complete(project)) == [RUNS[3]]


@pytest.mark.parametrize('study, data, cells, last', [
    ('quick', 'toy', 40, 'L4_lr0.3_qk1_s1338'), ('cpu', 'tinystories-5m', 234, 'L8_lr0.3_qk1_s1339'),
    ('paper', 'tinystories', 234, 'L10_lr0.3_qk1_s1339')])
def test_sweep_studies_have_their_grids(project, study, data, cells, last):
    lines = run_sweep(project, study, '--list').stdout_text.splitlines()
    flags = dict(re.findall(r'--(\w+) (\S+)', lines[-1]))
    assert len(set(lines)) == cells and 'L{n_layer}_lr{lr}_qk{qknorm}_s{seed}'.format(**flags) == last
    assert flags['dataset'] == data
    if study == 'paper':
        assert lines == run_sweep(project, '--list').stdout_text.splitlines()


def test_sweep_trains_the_grid_analyses_it_and_keeps_the_plan(project):
    done = run_sweep(project, DIVERGES=RUNS[1], **GRID)
    assert done.returncode == 0 and not done.stderr_text
    assert set(complete(project)) == set(RUNS)
    assert re.search(rf'\[16/16, eta 0s\] \S+ ok val 1.250 60 s', done.stdout_text)
    assert re.search(rf'{RUNS[1]} diverged at step 7 60 s', done.stdout_text)
    assert 'analyzed logs/tiny\n' in done.stdout_text
    plan = dict(line.split(' ', 1) for line in (project / 'logs/tiny/plan.txt').read_text().splitlines())
    assert list(plan) == 'study lrs depths seeds arms args device threads code data'.split()
    assert (plan['study'], plan['lrs'], plan['depths'], plan['seeds'], plan['arms']) == (
        'tiny', '0.001 0.1', '1 2', '7 8', '0 1')
    assert plan['device'] == 'cpu' and len(plan['code']) == 64 and plan['data'] == 'd1'
    assert plan['args'].startswith('--dataset tinystories --max_iters 1000')
    # seeds outermost: the first eight cells are the first seed's
    assert [i for i, c in enumerate(calls(project)[1:]) if '--seed 7 ' in c] == list(range(8))


def test_sweep_starts_no_python_for_finished_cells(project):
    run_sweep(project, **GRID)
    (project / 'calls').unlink()
    again = run_sweep(project, **GRID)
    assert again.returncode == 0 and '16 done, 0 to do' in again.stdout_text
    assert len(calls(project)) == 1 and '--prepare' in calls(project)[0]
    (project / 'logs/tiny' / (RUNS[5] + '.csv')).unlink()
    again = run_sweep(project, JOBS='1', **GRID)
    assert '15 done, 1 to do' in again.stdout_text and 'time left: 1m00s' in again.stdout_text
    assert len(calls(project)) == 3 and set(complete(project)) == set(RUNS)


def test_sweep_starts_no_python_for_a_cell_that_was_finished_meanwhile(project):
    grid = {**GRID, 'DEPTHS': '1', 'SEEDS': '7', 'JOBS': '1'}
    sweep = start_sweep(project, PAUSE='0.5', **grid)
    wait_for(lambda: list(project.rglob('*.partial')))
    (project / 'logs/tiny' / (RUNS[3] + '.csv')).write_text('# {"wall_s": 1}\n')
    sweep.communicate(timeout=20)
    assert sweep.returncode == 0 and len(calls(project)) == 4  # --prepare and three cells


def test_sweep_time_left_is_of_the_same_depth_else_by_the_layer(project):
    logs = project / 'logs/tiny'
    logs.mkdir(parents=True)
    (logs / 'L1_lr0.001_qk0_s7.csv').write_text('# {"wall_s": 100.0}\n')
    (logs / 'L2_lr0.001_qk0_s7.csv').write_text('# {"wall_s": 260.0}\n')
    grid = {**GRID, 'DEPTHS': '1 2 4', 'FAILS': '', 'JOBS': '2'}
    # 7 x 100 and 7 x 260 by depth, 8 cells of 4 layers at (100 + 260) / (1 + 2) s a layer, two at a time
    expected = (7 * 100 + 7 * 260 + 8 * 4 * 120) / 2
    first = run_sweep(project, PAUSE='0', **grid)
    assert f'time left: {int(expected // 60)}m{int(expected % 60):02d}s' in first.stdout_text


def test_sweep_dry_run_measures_and_trains_nothing(project):
    done = run_sweep(project, '--dry-run', JOBS='4', **GRID)
    assert done.returncode == 0 and not (project / 'logs').exists()
    assert '16 to do' in done.stdout_text
    assert 'time left: 10m00s' in done.stdout_text  # (8 x 100 s + 8 x 200 s) / 4
    assert sum('--dry_run 1' in c for c in calls(project)) == 2


def test_sweep_refuses_another_plan_and_extends_a_grid(project):
    run_sweep(project, **GRID)
    before = complete(project)
    for changes, shown in (({'MAX_ITERS': '9'}, '-args --dataset tinystories --max_iters 1000'),
                           ({'LRS': '.1'}, '+lrs 0.1'), ({'DEVICE': 'cuda'}, '-device cpu')):
        other = run_sweep(project, **{**GRID, **changes})
        assert other.returncode == 2 and shown in other.stderr_text and 'STUDY=name' in other.stderr_text
    larger = run_sweep(project, **{**GRID, 'LRS': '1e-3 1e-2 1e-1', 'SEEDS': '8 7'})
    assert larger.returncode == 0
    assert 'extended' in larger.stdout_text and '16 done, 8 to do' in larger.stdout_text
    assert len(complete(project)) == 24 and before.items() <= complete(project).items()
    assert '\nlrs 0.001 0.01 0.1\n' in (project / 'logs/tiny/plan.txt').read_text()
    with open(project / 'qkgpt.py', 'a') as f:
        f.write('# another trainer\n')
    other = run_sweep(project, **{**GRID, 'LRS': '1e-3 1e-2 1e-1'})
    assert other.returncode == 2 and '+code ' in other.stderr_text and '-code ' in other.stderr_text
    for lost in ('.*', '(code|data|threads) .*', 'depths .*'):  # as a full disk or an editor may leave it
        plan = project / 'logs/tiny/plan.txt'
        whole = plan.read_text()
        kept = [line for line in whole.splitlines(True) if not re.fullmatch(lost, line.strip())]
        plan.write_text(''.join(kept))
        assert run_sweep(project, **{**GRID, 'LRS': '1e-3 1e-2 1e-1'}).returncode == 2
        plan.write_text(whole)
    for damaged in (b'\0\xff' * 99, whole.encode() + b'lrs 0.1\n',
                    whole.replace('threads ', 'threads x').encode()):
        plan.write_bytes(damaged)
        assert run_sweep(project, **{**GRID, 'LRS': '1e-3 1e-2 1e-1'}).returncode == 2
        assert plan.read_bytes() == damaged
    plan.unlink()
    plan.mkdir()
    refused(run_sweep(project, **GRID), 'logs/tiny/plan.txt', 'not a file')


def test_sweep_gives_every_cell_more_flags(project):
    done = run_sweep(project, ARGS='--warmup_ratio 0.05 --bias 1', **GRID)
    assert done.returncode == 0 and set(complete(project)) == set(RUNS)
    assert all(' --max_iters 1000 --warmup_ratio 0.05 --bias 1 ' in call + ' ' for call in calls(project))
    assert ' --warmup_ratio 0.05 --bias 1\n' in (project / 'logs/tiny/plan.txt').read_text()
    other = run_sweep(project, **GRID)
    assert other.returncode == 2 and '+args --dataset tinystories --max_iters 1000\n' in other.stderr_text


def test_sweep_leaves_the_same_plan_alone(project):
    run_sweep(project, '--cell', '1', **GRID)  # cells of a cluster start together, and would race to write it
    before = (project / 'logs/tiny/plan.txt').stat()
    starts = [start_sweep(project, '--cell', str(n), **GRID) for n in range(2, 8)]
    for start in starts:
        assert start.communicate(timeout=60) and start.returncode == 0
    after = (project / 'logs/tiny/plan.txt').stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_sweep_dry_run_fails_with_its_timing(project):
    assert run_sweep(project, '--dry-run', UNTIMED='1', **GRID).returncode == 1


def test_sweep_reports_a_failed_cell_and_goes_on(project):
    failed = run_sweep(project, FAILS=RUNS[2], **GRID)
    assert failed.returncode == 1 and set(complete(project)) == set(RUNS) - {RUNS[2]}
    assert f'{RUNS[2]} FAILED with exit status 1: {RUNS[2]}: out of memory' in failed.stdout_text
    assert failed.stderr_text == f'failed: logs/tiny/{RUNS[2]}.err: {RUNS[2]}: out of memory\n'
    assert (project / f'logs/tiny/{RUNS[2]}.err').read_text().startswith('first line\n')
    again = run_sweep(project, **GRID)
    assert again.returncode == 0 and set(complete(project)) == set(RUNS)
    assert not list((project / 'logs/tiny').glob('*.err'))


def test_sweep_fails_when_the_analysis_fails(project):
    (project / 'analyze.py').write_text('import sys\nsys.exit(1)\n')
    assert run_sweep(project, **GRID).returncode == 1


def test_sweep_runs_n_cells_at_once_and_shares_the_cores(project):
    done = run_sweep(project, PAUSE='0.3', JOBS='3', SLURM_CPUS_ON_NODE='7', **GRID)
    assert done.returncode == 0
    running, most = 0, 0
    for line in (project / 'started').read_text().splitlines():
        running += 1 if line[0] == '+' else -1
        most = max(most, running)
    assert most == 3
    assert {re.search(r'--threads (\d+)', c)[1] for c in calls(project)[1:]} == {'2'}
    for device, jobs, threads in (('cpu', 7, 1), ('mps', 1, 7)):
        plan = run_sweep(project, '--dry-run', SLURM_CPUS_ON_NODE='7', MACHINE=device).stdout_text
        assert f'{jobs} at once with threads: {threads},' in plan


def test_sweep_keeps_the_threads_of_its_plan(project):
    assert run_sweep(project, '--cell', '1', SLURM_CPUS_ON_NODE='4', **GRID).returncode == 0
    assert run_sweep(project, JOBS='4', SLURM_CPUS_ON_NODE='4', **GRID).returncode == 0
    assert {re.search(r'--threads (\d+)', c)[1] for c in calls(project) if '--lr' in c} == {'4'}


@pytest.mark.parametrize('signum', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_sweep_interrupted_stops_its_cells(project, signum):
    sweep = start_sweep(project, PAUSE='30', JOBS='2', **GRID)
    wait_for(lambda: len(list(project.rglob('*.partial'))) == 2)
    sweep.send_signal(signum)
    output, errors = sweep.communicate(timeout=10)  # ends only when no cell holds the pipe any more
    assert sweep.returncode == 130 and 'goes on from here' in errors and not complete(project)
    assert not list(project.rglob('*.err'))
    done = run_sweep(project, **GRID)
    assert done.returncode == 0 and set(complete(project)) == set(RUNS)


def test_sweep_killed_anywhere_goes_on_to_the_same_logs(project, tmp_path):
    whole = tmp_path / 'whole'
    shutil.copytree(project, whole)
    assert run_sweep(whole, **GRID).returncode == 0
    for delay in (0.05, 0.3, 0.5, 0.7, 0.9):
        sweep = start_sweep(project, PAUSE='0.1', JOBS='2', **GRID)
        time.sleep(delay)
        os.killpg(sweep.pid, signal.SIGKILL)
        sweep.communicate(timeout=10)
    done = run_sweep(project, **GRID)
    assert done.returncode == 0 and complete(project) == complete(whole)
    assert not list(project.rglob('*.partial'))


def test_sweep_killed_takes_its_cells_along(project):
    sweep = start_sweep(project, PAUSE='30', JOBS='2', **GRID)
    wait_for(lambda: len(list(project.rglob('*.partial'))) == 2)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.communicate(timeout=10)  # ends only when no cell holds the pipe any more
    assert not complete(project)


def test_sweep_twice_at_once_runs_each_cell_once(project):
    both = [start_sweep(project, PAUSE='0.2', JOBS='2', **GRID) for _ in range(2)]
    for sweep in both:
        assert sweep.communicate(timeout=120)[1] == '' and sweep.returncode == 0
    started = [line for line in (project / 'started').read_text().splitlines() if line[0] == '+']
    assert sorted(started) == sorted('+' + run for run in RUNS)
    assert set(complete(project)) == set(RUNS)


def test_sweep_waits_for_a_cell_of_another_sweep(project):
    partial = project / 'logs/tiny' / (RUNS[0] + '.csv.partial')
    partial.parent.mkdir(parents=True)
    with open(partial, 'w') as other:  # as if another sweep were running this cell
        fcntl.flock(other, fcntl.LOCK_EX)
        sweep = start_sweep(project, **GRID)
        line = next(line for line in sweep.stdout if line.startswith('waiting'))
    sweep.communicate(timeout=120)
    assert line == 'waiting for cells of another sweep: 1\n'
    assert sweep.returncode == 0 and set(complete(project)) == set(RUNS)


def test_sweep_runs_one_cell_by_number_or_slurm_task(project, tmp_path):
    assert run_sweep(project, '--cell', '4', SLURM_CPUS_ON_NODE='5', **GRID).returncode == 0
    spool = tmp_path / 'spool'
    spool.mkdir()
    shutil.copy(project / 'sweep.sh', spool / 'slurm_script')
    slurm = {'SLURM_ARRAY_TASK_ID': '6', 'SLURM_SUBMIT_DIR': str(project), 'SLURM_CPUS_ON_NODE': '5'}
    done = subprocess.run(['bash', 'slurm_script'], cwd=spool, env=environment({**GRID, **slurm}),
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(complete(project)) == {RUNS[3], RUNS[5]} and '--threads 5 ' in calls(project)[-1]
    before = len(calls(project))
    again = run_sweep(project, '--cell', '6', **GRID)
    assert again.returncode == 0 and 'already complete' in again.stdout_text
    assert len(calls(project)) == before + 1  # --prepare, no training
    assert run_sweep(project, '--cell', '5', FAILS=RUNS[4], **GRID).returncode == 1
    for number in ('0', '17', 'x', '-1', '1.5'):
        refused(run_sweep(project, '--cell', number, **GRID), 'cell', '1 to 16')
    refused(run_sweep(project, '--cell'), '--cell')


def test_sweep_self_tests_once_where_the_device_is_not_the_cpu(project):
    broken = run_sweep(project, MACHINE='mps', SELFTEST='causality: FAILED', **GRID)
    assert broken.returncode == 1 and 'causality: FAILED' in broken.stderr_text
    assert not (project / 'logs').exists()
    for _ in range(2):
        assert run_sweep(project, MACHINE='mps', **GRID).returncode == 0
    tests = [c for c in calls(project) if '--selftest 1' in c]
    assert len(tests) == 2 and '--n_layer 2 --device mps' in tests[1]
    assert {re.search(r'--device (\w+)', c)[1] for c in calls(project) if '--lr' in c} == {'mps'}
    run_sweep(project, **{**GRID, 'STUDY': 'other'})
    assert sum('--selftest 1' in c for c in calls(project)) == 2


@pytest.mark.parametrize('text, seeds', [
    ('# fixed\n\n5\n6 # two\n 7\n', '5 6 7'), ('5\r\n6\r\n7\r\n8\r\n', '5 6 7'), ('# old\r5\r6', '5 6'),
    ('0', '0')])
def test_sweep_reads_seeds(project, text, seeds):
    (project / 'seeds.txt').write_bytes(text.encode())
    lines = run_sweep(project, 'cpu', '--list').stdout_text.splitlines()
    found = list(dict.fromkeys(re.search(r'--seed (\d+)', line)[1] for line in lines))
    assert found == seeds.split()


@pytest.mark.parametrize('text, words', [
    ('1\r\nx7\r\n', ('seeds.txt', 'line 2', 'x7')), ('1\n\n# c\n2 3\n', ('seeds.txt', 'line 4', '2 3')),
    ('1\n-2\n', ('seeds.txt', 'line 2', '-2')), ('*\n', ('seeds.txt', 'line 1', '*')),
    ('# none\n', ('seeds.txt', 'no seed')), ('1\n1\n', ('SEEDS', '1', 'twice')), ('01\n', ('SEEDS', '01'))])
def test_sweep_refuses_bad_seeds(project, text, words):
    (project / 'seeds.txt').write_bytes(text.encode())
    refused(run_sweep(project, 'quick'), *words)
    assert not (project / 'logs').exists() and not calls(project)


@pytest.mark.parametrize('changes, words', [
    ({'LRS': '1e-3'}, ('LRS', 'STUDY=name')),
    ({'DEVICE': 'cpu', 'SEEDS': '1'}, ('SEEDS DEVICE', 'STUDY=name')),
    ({'STUDY': 'a/b'}, ('STUDY', 'a/b')), ({'STUDY': 's', 'LRS': ''}, ('LRS', 'empty')),
    ({'STUDY': 's', 'LRS': '1e-3 0,01'}, ('LRS', '0,01')), ({'STUDY': 's', 'LRS': '0.0'}, ('LRS', '0')),
    ({'STUDY': 's', 'LRS': '-1'}, ('LRS', '-1')),
    ({'STUDY': 's', 'LRS': '1e-3 0.001'}, ('LRS', '0.001', 'twice')),
    ({'STUDY': 's', 'LRS': '*'}, ('LRS', '*')), ({'STUDY': 's', 'DEPTHS': '2 0'}, ('DEPTHS', '0')),
    ({'STUDY': 's', 'DEPTHS': ' '}, ('DEPTHS', 'empty')), ({'STUDY': 's', 'SEEDS': 'a'}, ('SEEDS', 'a')),
    ({'STUDY': 's', 'MAX_ITERS': '1 2'}, ('MAX_ITERS', '1 2')), ({'JOBS': '0'}, ('JOBS', '0')),
    ({'ARGS': '--bias 1'}, ('ARGS', 'STUDY=name')), ({'STUDY': 's', 'ARGS': 'bias 1'}, ('ARGS', 'bias 1')),
    ({'STUDY': 's', 'ARGS': '--bias 1 --lr 1'}, ('ARGS', '--lr is set by the sweep')),
    ({'STUDY': 's', 'ARGS': '--dataset "x"'}, ('ARGS', '--dataset "x"')),
    ({'STUDY': 's', 'ARGS': '--dry_run=1'}, ('ARGS', '--dry_run is set by the sweep')),
    ({'STUDY': 's', 'ARGS': '--bias'}, ('ARGS', "'--bias'")),
    ({'STUDY': 's', 'ARGS': '--bias 1\n2'}, ('ARGS',)),
    ({'SLURM_CPUS_ON_NODE': '4(x2)'}, ('SLURM_CPUS_ON_NODE', '4(x2)')),
    ({'PYTHON': '/nowhere/python'}, ('PYTHON', '/nowhere/python')), ({'PYTHON': 'true'}, ('PYTHON', 'true'))])
def test_sweep_refuses_bad_environment(project, changes, words):
    refused(run_sweep(project, 'quick', **changes), *words)
    assert not (project / 'logs').exists() and not calls(project)


def test_sweep_refuses_folders_where_it_needs_files(project):
    (project / 'seeds.txt').unlink()
    (project / 'seeds.txt').mkdir()
    refused(run_sweep(project, 'quick'), 'seeds.txt')
    (project / 'logs').mkdir()
    (project / 'logs/tiny').write_text('')
    refused(run_sweep(project, **GRID), 'logs/tiny', 'folder')


def test_sweep_refuses_bad_arguments(project):
    refused(run_sweep(project, 'qick'), 'qick', 'quick, cpu or paper')
    refused(run_sweep(project, 'quick', 'cpu'), 'quick', 'cpu')
    shown = run_sweep(project, '--help')
    assert shown.returncode == 0 and 'JOBS=n' in shown.stdout_text and not calls(project)


def fake_command(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text('#!/bin/sh\n' + text)
    (folder / name).chmod(0o755)


def test_sweep_passes_over_an_old_python_and_makes_the_venv_once(project, tmp_path):
    tools = tmp_path / 'tools'
    fake_command(tools, 'python3', f"""
        exec '{sys.executable}' -c "import sys; sys.version_info = (3, 9, 6)  # macOS's own
$2"
        """)
    (tmp_path / 'venv_python').write_text(f"""#!/bin/sh
        if [ "$1 $2" = "-m pip" ]; then touch installed; exit; fi
        case $2 in *metadata*) if [ -e installed ]; then echo ready; else echo bare; fi; exit ;; esac
        exec '{sys.executable}' "$@"
        """)
    fake_command(tools, 'python3.13', f"""
        if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp '{tmp_path}/venv_python' "$3/bin/python"
            chmod +x "$3/bin/python"; exit; fi
        case $2 in *metadata*) echo bare ;; *) exec '{sys.executable}' "$@" ;; esac
        """)
    for name in ('awk', 'bash', 'cat', 'chmod', 'cp', 'cut', 'diff', 'dirname', 'grep', 'mkdir', 'mv', 'rm',
                 'sed', 'sleep', 'tail', 'touch', 'tr', 'wc', 'xargs'):
        (tools / name).symlink_to(shutil.which(name))
    changes = {**GRID, 'PYTHON': '', 'PATH': str(tools)}
    listed = run_sweep(project, '--list', **changes)
    assert listed.stdout_text.startswith('.venv/bin/python qkgpt.py ') and not (project / '.venv').exists()
    done = run_sweep(project, **changes)
    assert done.returncode == 0, done.stderr_text
    assert 'installing requirements.txt into .venv with python3.13' in done.stdout_text
    assert set(complete(project)) == set(RUNS)
    assert 'installing' not in run_sweep(project, **changes).stdout_text
    (tools / 'python3.13').unlink()
    shutil.rmtree(project / '.venv')
    refused(run_sweep(project, **changes), 'Python 3.11', 'PYTHON')


def test_sweep_keeps_a_mac_awake(project, tmp_path):
    fake_command(tmp_path / 'tools', 'caffeinate', f'echo "$@" > "{tmp_path}/caffeinated"\n')
    done = run_sweep(project, PATH=f"{tmp_path}/tools:{os.environ['PATH']}", **GRID)
    assert done.returncode == 0
    assert re.fullmatch(r'-ims -w \d+\n', (tmp_path / 'caffeinated').read_text())


@pytest.mark.skipif(not shutil.which('busybox'), reason='no busybox')
def test_sweep_with_small_tools_and_a_comma_locale(project, tmp_path):
    tools = tmp_path / 'tools'
    tools.mkdir()
    applets = subprocess.run(['busybox', '--list'], capture_output=True, text=True, check=True).stdout.split()
    for name in set(applets) - {'bash', 'python3'}:
        (tools / name).symlink_to(shutil.which('busybox'))
    (tools / 'bash').symlink_to(shutil.which('bash'))
    done = run_sweep(project, PATH=str(tools), LC_ALL='de_DE.UTF-8', LC_NUMERIC='de_DE.UTF-8', **GRID)
    assert done.returncode == 0 and not done.stderr_text, done.stderr_text
    assert set(complete(project)) == set(RUNS) and 'ok val 1.250' in done.stdout_text
    other = run_sweep(project, PATH=str(tools), LC_ALL='de_DE.UTF-8', **{**GRID, 'LRS': '.1'})
    assert other.returncode == 2 and '-lrs 0.001 0.1' in other.stderr_text and '+lrs 0.1' in other.stderr_text


def test_sweep_uses_nothing_that_macos_lacks():
    code = re.sub(r'(^|\s)#.*', '', (ROOT / 'sweep.sh').read_text())
    lacking = (r'\bmapfile\b|\breadarray\b|\bcoproc\b|declare -A|wait -n|\|&|&>>|EPOCH|\$\{\w+(,,|\^\^|@)'
               r'|\btimeout\b|\bflock \b|sed -i|readlink -f|date -d|\bseq\b|sort -V|grep -P|\bnproc\b'
               r'|sha256sum|\bsetsid\b|xargs -[dr]')
    assert not re.search(lacking, code), re.search(lacking, code)


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='no shellcheck')
def test_sweep_is_shellcheck_clean():
    checked = subprocess.run(['shellcheck', ROOT / 'sweep.sh'], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_sweep_with_the_real_trainer_and_analysis(project):
    for name in ('qkgpt.py', 'analyze.py'):
        shutil.copy(ROOT / name, project)
    (project / 'data').mkdir()
    shutil.copy(ROOT / 'data/toy_stories.txt', project / 'data')
    grid = {'STUDY': 'real', 'LRS': '1e-3 3e-1', 'DEPTHS': '1', 'SEEDS': '3', 'MAX_ITERS': '4',
            'DEVICE': 'cpu'}
    done = run_sweep(project, 'quick', **grid)
    assert done.returncode == 0, done.stdout_text + done.stderr_text
    for run, text in complete(project, 'real').items():
        assert json.loads(text.splitlines()[0][2:])['run'] == run
        assert json.loads(text.splitlines()[-1][2:])['status'] == 'ok'
    assert len(complete(project, 'real')) == 4
    assert {p.suffix for p in (project / 'logs/real/figures').iterdir()} == {'.pdf', '.png', '.csv'}
    again = run_sweep(project, 'quick', **grid)
    assert again.returncode == 0 and '4 done, 0 to do' in again.stdout_text


# -----------------------------------------------------------------------------
# the analysis

LRS = [3e-4, 5.5e-4, 1e-3, 1.7e-3, 3e-3, 5.5e-3, 1e-2, 1.7e-2, 3e-2, 5.5e-2, 1e-1, 1.7e-1, 3e-1]
COLUMNS = ('step,tokens,lr,train_loss,grad_norm,val_loss,val_ppl,val_bpb,attn_entropy,attn_entropy_norm,'
           'attn_entropy_min,max_logit,max_logit_0,kurtosis,kurtosis_last,sink,log_z,seconds').split(',')


def write_log(folder, arm, depth, lr, seed, loss=3.0, l0=7.6, diverged_at=None, curve=None, max_logit=10.0,
              entropy=3.0, kurtosis=4.0, code='c0de', sha='da7a', **settings):
    """A log of the form qkgpt.py writes; `curve` gives the validation loss at step / max_iters."""
    config = {'qknorm': bool(arm), 'n_layer': depth, 'n_head': 4, 'n_embd': 128, 'block_size': 128, 'lr': lr,
              'min_lr': 1e-5, 'max_iters': 500, 'dataset': 'tinystories-5m', 'seed': seed, 'device': 'cpu',
              'dtype': 'float32', **settings}
    evals = settings.get('eval_interval', 50)
    config.update(eval_interval=evals, log_interval=10)
    name = f'L{depth}_lr{lr:g}_qk{arm}_s{seed}'
    header = {'run': name, 'config': config, 'code': code,
              'data': {'dataset': 'tinystories-5m', 'sha256': sha},
              'git': 'abc1234', 'versions': {'python': '3.11.2', 'torch': '2.13.0'}, 'processor': 'AMD EPYC',
              'threads': 1, 'dtype': 'float32', 'start': '2026-01-01T00:00:00Z'}
    curve = curve or (lambda x: loss + (l0 - loss) * math.exp(-9 * x) * (1 - x))
    lines = ['# ' + json.dumps(header), ','.join(COLUMNS)]
    last = diverged_at or config['max_iters']
    for step in range(0, last + 1, 10):
        row = dict.fromkeys(COLUMNS, '')
        x = step / config['max_iters']
        row.update(step=step, tokens=step * 2048, lr=f'{lr * (1 - x):.9g}', seconds=f'{random.random():.9g}')
        if step:
            row.update(train_loss='nan' if diverged_at == step else f'{curve(x):.9g}', grad_norm='1')
        if step % evals == 0 and step != diverged_at:
            value = curve(x) if step else l0
            row.update(val_loss=f'{value:.9g}', val_ppl=f'{math.exp(value):.9g}', val_bpb=f'{value / 2:.9g}',
                       attn_entropy=f'{3.9 + (entropy - 3.9) * x:.9g}', attn_entropy_norm='0.8',
                       attn_entropy_min='0.5', max_logit=f'{max_logit ** x:.9g}', max_logit_0='1',
                       kurtosis=f'{3 * (kurtosis / 3) ** x:.9g}', kurtosis_last='3', sink='0.1', log_z='7.6')
        lines.append(','.join(str(row[c]) for c in COLUMNS))
    final = None if diverged_at else float(f'{curve(1.0):.9g}')
    footer = {'status': 'diverged' if diverged_at else 'ok', 'step': last, 'diverged_step': diverged_at,
              'initial_val_loss': l0, 'final_val_loss': final, 'best_val_loss': final,
              'wall_s': random.random()}
    path = Path(folder) / (name + '.csv')
    path.write_text('\n'.join(lines) + '\n# ' + json.dumps(footer) + '\n')
    return path


def write_study(folder, cell, lrs=LRS, depths=(2, 4, 8), seeds=(1337, 1338, 1339), **settings):
    """A study of cells: cell(arm, depth, lr, seed) gives the arguments of write_log, None a missing one."""
    folder.mkdir(parents=True)
    for arm in (0, 1):
        for depth in depths:
            for lr in lrs:
                for seed in seeds:
                    made = cell(arm, depth, lr, seed)
                    if made is not None:
                        write_log(folder, arm, depth, lr, seed, **made, **settings)
    lists = {'lrs': lrs, 'depths': depths, 'seeds': seeds}
    text = '\n'.join(f'{k} ' + ' '.join(f'{v:g}' for v in values) for k, values in lists.items())
    (folder / 'plan.txt').write_text(f'# plan\nstudy {folder.name}\n{text}\narms 0 1\ncode c0de\ndata da7a\n')
    return folder


def lifelike(arm, depth, lr, seed, noise=0.03):
    """Losses of the pilot's kind: the off arm fails from an LR on that falls with depth; its logits grow."""
    draw = np.random.default_rng([arm, depth, seed, int(lr * 1e6)]).standard_normal
    x, onset = math.log10(lr), -1.4 - 0.25 * math.log2(depth / 2) + 0.05 * (seed - 1338)
    rise = 1 / (1 + math.exp(-(x - onset) * 9))
    loss = 2.95 - 0.03 * depth ** 0.5 + 0.55 * max(0, -2.2 - x) ** 1.6 + 0.12 * max(0, x + 1.9) ** 2
    loss += (0.25 if arm else 2.3) * rise + 0.02 * arm * (x < -2.5) + noise * draw() * (0.3 + rise)
    max_logit = (4.5 if arm else 14 * 10 ** (1.9 * max(0, x + 2.6))) * math.exp(0.1 * draw())
    entropy = (2.8 if arm else max(0.04, 3.2 - 2.2 * max(0, x + 2.7))) + 0.05 * draw()
    kurtosis = 3.2 * 10 ** ((0.3 if arm else 0.55) * max(0, x + 2)) * math.exp(0.1 * draw())
    return {'loss': loss, 'l0': 7.63 + 0.004 * arm + 0.002 * (seed - 1338), 'max_logit': max_logit,
            'entropy': entropy, 'kurtosis': kurtosis}


def run_analyze(*args):
    """analyze.py's main in this process, as what subprocess.run would return: the fast way."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            returncode = analyze.main([str(arg) for arg in args])
        except SystemExit as e:
            returncode = e.code
    return SimpleNamespace(returncode=returncode, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def start_analyze(*args, cwd=None):
    """analyze.py as a user starts it, with settings of display, date and hash seed that must not matter."""
    env = {**os.environ, 'MPLBACKEND': 'no-such-backend', 'SOURCE_DATE_EPOCH': 'no-such-date',
           'PYTHONHASHSEED': str(random.randrange(1000))}
    command = [sys.executable, Path(analyze.__file__).resolve(), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def assert_refused(done, *words):
    assert done.returncode == 2 and done.stderr.count('\n') == 1 and 'Traceback' not in done.stderr, done
    for word in words:
        assert word in done.stderr


def results(folder):
    return json.loads((folder / 'results.json').read_text())


@pytest.fixture(scope='module')
def study_folder(tmp_path_factory):
    """A complete lifelike study, analysed once; tests must not change it."""
    folder = write_study(tmp_path_factory.mktemp('logs') / 'cpu', lifelike)
    done = start_analyze(folder)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder, done.stdout


# ---- the statistics

def test_analyze_t_quantile_against_tables():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
             10: 2.228, 15: 2.131, 20: 2.086, 24: 2.064, 29: 2.045}
    for df, t in table.items():
        assert abs(analyze.t_quantile(df) - t) < 6e-4, df
    assert abs(analyze.t_quantile(2, 0.99) - 9.925) < 6e-4 and abs(analyze.t_quantile(9, 0.90) - 1.833) < 6e-4
    assert abs(analyze.t_quantile(2) - 0.95 * math.sqrt(2 / (1 - 0.95 ** 2))) < 1e-9  # df 2 has a closed form


def test_analyze_t_quantile_is_the_inverse_of_the_density_integral():
    for df in range(1, 30):
        x = np.linspace(0, analyze.t_quantile(df), 20001)
        constant = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
        assert abs(2 * np.trapezoid(constant * (1 + x * x / df) ** (-(df + 1) / 2), x) - 0.95) < 1e-6


def test_analyze_summary_by_hand():
    s = analyze.summary([1.0, 2.0, 3.0])
    assert s['mean'] == 2 and s['n'] == 3
    assert abs(s['hi'] - (2 + 4.302653 / math.sqrt(3))) < 1e-6 and abs(s['lo'] + s['hi'] - 4) < 1e-12
    assert analyze.summary([1.0, None, 3.0]) == {**analyze.summary([1.0, 3.0]), 'of': 3}
    assert analyze.summary([1.0])['lo'] is None and analyze.summary([1.0])['mean'] == 1
    never = analyze.summary([1.0, math.inf, 3.0])
    assert never['mean'] is None and never['open'] == 1 and never['n'] == 3
    assert analyze.summary([None, None])['mean'] is None


# ---- the measures, on tables worked by hand

def test_analyze_lr_sensitivity_by_hand(tmp_path):
    # losses 4 3 3.5, one above l0 = 5, one diverged: both count as 5; l* = 3; S = (1 + 0 + 0.5 + 2 + 2) / 5
    cells = {1e-3: dict(loss=4.0), 1e-2: dict(loss=3.0), 1e-1: dict(loss=3.5), 2e-1: dict(loss=9.0),
             3e-1: dict(diverged_at=70)}
    def cell(arm, depth, lr, seed):
        return dict(cells[lr], l0=5.0)
    study = analyze.analyze(write_study(tmp_path / 's', cell, list(cells), (2,), (1, 2)))
    assert study.arms['sensitivity'][2][0] == pytest.approx([1.1, 1.1])
    assert math.isnan(study.arms['sensitivity_7'][2][0][0])  # this grid has not Wortsman's seven
    assert study.arms['best_loss'][2][0] == [3.0, 3.0] and study.arms['best_lr'][2][1] == [1e-2, 1e-2]
    assert study.arms['perplexity'][2][0] == pytest.approx([math.exp(3)] * 2)
    assert study.arms['bpb'][2][0] == pytest.approx([1.5, 1.5])  # the logs say half a bit per byte a nat
    assert study.values[0, 2, 3e-1, 1]['perplexity'] == pytest.approx(math.exp(5))
    assert study.arms['max_stable_0.5'][2][0] == [1e-1, 1e-1]
    assert study.arms['max_stable_0.25'][2][0] == [1e-2, 1e-2]


def test_analyze_wortsmans_seven(tmp_path):
    def cell(arm, depth, lr, seed):  # the six points between them are better, and must not count
        return {'loss': 3.0 + LRS.index(lr) / 10 if LRS.index(lr) % 2 == 0 else 2.0}
    study = analyze.analyze(write_study(tmp_path / 's', cell, depths=(2,), seeds=(1,)))
    assert study.arms['sensitivity_7'][2][0] == pytest.approx([np.mean([0, .2, .4, .6, .8, 1.0, 1.2])])
    excess = [1, 0, 1.2, 0, 1.4, 0, 1.6, 0, 1.8, 0, 2, 0, 2.2]
    assert study.arms['sensitivity'][2][0] == pytest.approx([np.mean(excess)])


@pytest.mark.parametrize('loss, diverged, delta, top', [
    ([3.2, 3.0, 3.4, 4.0], [0, 0, 0, 0], 0.5, 2),
    ([3.2, 3.0, 3.5, 4.0], [0, 0, 0, 0], 0.5, 2),      # exactly l* + delta is stable
    ([3.2, 3.0, 3.4, 3.5], [0, 0, 0, 0], 0.5, 3),      # censored: the grid's edge
    ([3.2, 3.0, 3.8, 3.1], [0, 0, 0, 0], 0.5, 1),      # stable again beyond an unstable one does not count
    ([3.2, 3.0, 3.4, 3.4], [0, 0, 1, 0], 0.5, 1),      # a diverged one is not stable, whatever it counts as
    ([3.0, 3.6, 3.0, 9.0], [0, 0, 0, 0], 0.5, 0),      # a tie: from the lower of the two
    ([5.0, 5.0, 5.0], [1, 1, 1], 0.5, -1),             # all diverged: nothing is stable
    ([5.0, 5.0, 5.0], [1, 0, 1], 0.5, 1),              # a diverged one is no optimum beside one that is not
    ([3.2, 3.0, 3.4, 4.0], [0, 0, 0, 0], 1.0, 3)])
def test_analyze_max_stable_by_hand(loss, diverged, delta, top):
    assert analyze.max_stable(loss, diverged, delta) == top


@pytest.mark.parametrize('gap, last, first', [
    ([0.0, 0.0, 0.2, 1.0], 10 ** -1.5, 10 ** -1.5),              # half way from 0.01 to 0.1, in log LR
    ([0.0, 0.3, 0.0, 0.2], 10 ** -0.5, 10 ** (-3 + 1 / 3)),      # two rises: they differ
    ([0.0, 0.3, 0.3, 0.0], math.inf, 10 ** (-3 + 1 / 3)),        # helps in the middle only
    ([0.0, 0.05, 0.1, 0.1], math.inf, math.inf),                 # exactly the margin is not above it: never
    ([0.2, 0.3, 0.4, 0.5], 0.0, 0.0),                            # necessary everywhere: below the grid
    ([0.2, 0.0, 0.1, 0.6], 0.1, 0.0),                            # first at the lowest LR, last from 0.1 on
    ([3.1 - 3.0, 0.0, 3.1 - 3.0, 0.5], 0.1, 0.1)])               # 3.1 - 3.0 exceeds 0.1 by rounding alone
def test_analyze_necessity_by_hand(gap, last, first):
    assert analyze.necessity([1e-3, 1e-2, 1e-1, 1.0], gap) == (pytest.approx(last), pytest.approx(first))


def test_analyze_steps_to_threshold_by_hand(tmp_path):
    path = write_log(tmp_path, 0, 2, 1e-2, 1, curve=lambda x: 7.0 - 4 * x, l0=7.0)  # evaluated every 50 steps
    run = analyze.read_log(path)
    assert analyze.steps_to(run, 5.0) == pytest.approx(250)
    assert analyze.steps_to(run, 4.9) == pytest.approx(262.5)
    assert analyze.steps_to(run, 8.0) == 0 and analyze.steps_to(run, 2.9) == math.inf


def test_analyze_steps_are_to_the_off_arms_best_plus_a_tenth(tmp_path):
    def cell(arm, depth, lr, seed):  # linear from 7 down to 3 (off), to 2 (on, seed 1) or to 4 (on, seed 2)
        end = 3.0 if arm == 0 else 2.0 * seed
        return dict(curve=lambda x: 7.0 - (7.0 - end) * x, l0=7.0)
    study = analyze.analyze(write_study(tmp_path / 's', cell, [1e-2], (2,), (1, 2)))
    assert study.arms['steps'][2][0] == pytest.approx([487.5, 487.5])  # 3.1 is 3.9 / 4 of the way
    assert study.arms['steps'][2][1] == [pytest.approx(390), math.inf]
    text = '| steps to threshold at the best LR | 2 | 488 | not reached in 1 of 2 | not available | 2/2 |'
    assert text in analyze.section(study)


def test_analyze_gaps_at_low_and_high_lr_by_hand():
    losses = ([4.0, 3.0, 3.2, 5.0, 5.5], [4.1, 3.0, 3.0, 3.1, 3.3])
    off, on = ([{'loss': l, 'diverged': False} for l in arm] for arm in losses)
    pair = analyze.measure_pair([1e-3, 1e-2, 1e-1, 1.0, 10.0], off, on)
    assert pair['gap'] == pytest.approx([-0.1, 0.0, 0.2, 1.9, 2.2])
    assert pair['gap_low'] == pytest.approx(-0.05)  # up to the off arm's best, included
    assert pair['gap_high'] == pytest.approx(2.05)  # above 0.1, its maximum stable LR
    assert math.isnan(analyze.measure_pair([1e-3, 1e-2, 1e-1], off[:3], on[:3])['gap_high'])


def test_analyze_necessity_of_the_mean_curve():
    gaps = {2: [[0.0, 0.2], [0.0, 0.4]], 4: [[0.0, 0.2], None]}
    study = SimpleNamespace(lrs=[1e-2, 1e-1], pairs={'gap': gaps})
    assert analyze.mean_necessity(study, 2) == pytest.approx([10 ** (-2 + 1 / 3)] * 2)
    assert analyze.mean_necessity(study, 4) == (None, None)


def test_analyze_brackets_of_the_maximum_stable_lr():
    study = SimpleNamespace(lrs=[1e-2, 4e-2, 1e-1])
    for values, text in (([1e-2, 1e-2], '0.01 to 0.04'), ([1e-2, 4e-2], '0.02 to 0.0632'), ([1e-1], '>= 0.1'),
                         ([1e-2, math.nan], 'no stable LR in 1 of 2'),
                         ([1e-1, math.nan], 'no stable LR in 1 of 2'),
                         ([1e-2, None], '0.01 (1/2) to 0.04')):
        assert analyze.stable_text(study, values) == text


def test_analyze_latex_escapes():
    text = analyze.latex('50 % of l_0', ['a & b', 'n'], [['<= 0.1 [-0.2, 3]', '>= 2']])
    assert r'50 \% of l\_0' in text and r'a \& b & n \\' in text
    assert r'$\leq$ 0.1 [$-$0.2, 3] & $\geq$ 2 \\' in text


def test_analyze_mechanism_at_the_end_and_extremes(tmp_path):
    path = write_log(tmp_path, 0, 2, 1e-2, 1, max_logit=50.0, entropy=2.0)
    values = analyze.cell_values(analyze.read_log(path), None)
    assert values['max_logit'] == pytest.approx(50) and values['max_logit_extreme'] == pytest.approx(50)
    assert values['attn_entropy'] == pytest.approx(2) and values['attn_entropy_extreme'] == pytest.approx(2)
    text = path.read_text().replace(f',{50 ** 0.4:.9g},', ',900,').replace(f',{50 ** 0.5:.9g},', ',inf,')
    path.write_text(text)
    values = analyze.cell_values(analyze.read_log(path), None)
    assert values['max_logit'] == pytest.approx(50) and values['max_logit_extreme'] == 900


def test_analyze_mechanism_is_told_by_medians(tmp_path):
    def cell(arm, depth, lr, seed):
        logit = 5.0 if arm else 1e3 * lr * depth * seed  # off, over depths 2 and 4 and seeds 1 to 3
        return dict(loss=3.0, max_logit=logit, entropy=2.0 + arm, kurtosis=4.0 + seed)
    study = analyze.analyze(write_study(tmp_path / 's', cell, LRS, (2, 4), (1, 2, 3)))
    off = [float(np.median([1e3 * lr * d * s for d in (2, 4) for s in (1, 2, 3)])) for lr in LRS]
    _, header, rows = analyze.mechanism_table(study)
    assert header[1:3] == ['max attention logit, off', 'max attention logit, on']
    assert [row[:5] for row in rows] == [[f'{lr:g}', f'{x:.3g}', '5', '2', '3'] for lr, x in zip(LRS, off)]
    assert {row[5] for row in rows} == {row[6] for row in rows} == {'6'}
    middle = LRS[len(LRS) // 2]
    told = ', '.join(f'{1e3 * lr * 5:.3g} / 5 at LR {lr:g}' for lr in (LRS[0], middle, LRS[-1]))
    assert f'max attention logit {told}; attention entropy (nats) 2 / 3 at' in analyze.mechanism_text(study)
    study.lrs = LRS[:1]
    assert analyze.mechanism_text(study).count(' at LR ') == 3  # one LR is told once of each measure


def test_analyze_best_of_all_diverged_is_no_number(tmp_path):
    def cell(arm, depth, lr, seed):
        return dict(loss=3.0) if arm else dict(diverged_at=70)
    study = analyze.analyze(write_study(tmp_path / 's', cell, LRS, (2,), (1, 2)))
    assert study.arms['best_loss'][2][0] == [7.6, 7.6] and study.arms['sensitivity'][2][0] == [0, 0]
    h2, h3 = study.verdicts['H2'], study.verdicts['H3']
    assert h2['verdict'] == 'undecided' and 'no LR of the off arm is stable' in h2['why']
    assert h3['verdict'] == 'undecided' and 'below the grid' in h3['why']


# ---- many simulated studies: do the intervals cover the truth, and do the verdicts follow?

def simulated(rng, slope=-0.8, seeds=3, effect=1.0, spread=0.2):
    """A study in memory with a known answer: the off arm's loss exceeds that of the on arm by 0.1 nats at the
    LR 0.03 (depth / 2)^slope times a factor drawn per depth and seed, and rises by `effect` nats a decade;
    the on arm's never rises."""
    study = SimpleNamespace(lrs=LRS, depths=[2, 4, 8], seeds=list(range(seeds)), runs={}, missing=[])
    evaluations = {'step': ['0', '500'], 'val_bpb': ['3.5', '1.5']}
    evaluations.update(dict.fromkeys(analyze.MECHANISM, ['1', '1']))
    for depth in study.depths:
        for seed in study.seeds:
            log_onset = math.log10(0.03) + slope * math.log10(depth / 2) + spread * rng.standard_normal()
            for lr in LRS:
                rise = effect * max(0.0, math.log10(lr) - log_onset + 0.1 / effect if effect else 0.0)
                for arm, loss in ((0, 3.0 + rise), (1, 3.0)):
                    run = {'cell': (arm, depth, lr, seed), 'loss': loss, 'l0': 7.0, 'diverged': False,
                           'rows': {**evaluations, 'val_loss': ['7', f'{loss:.9g}']}}
                    study.runs[run['cell']] = run
    return study


def share(hits, total):
    """The bound of three standard errors around 95 %."""
    return abs(hits / total - 0.95) < 3 * math.sqrt(0.95 * 0.05 / total)


def test_analyze_slope_interval_covers_the_truth():
    rng, hits, n = np.random.default_rng(0), 0, 400
    for _ in range(n):
        study = analyze.measure(simulated(rng, slope=-0.6))
        s = analyze.summary([fit[0] for fit in analyze.seed_fits(study, 'necessity_last')])
        hits += s['lo'] <= -0.6 <= s['hi']
    assert share(hits, n), hits


@pytest.mark.parametrize('seeds', [2, 3, 5])
def test_analyze_paired_interval_covers_the_truth(seeds):
    # off = shared seed effect + 0.3 + noise: what is shared is large and must cancel in the pairs
    rng, hits, n = np.random.default_rng(1), 0, 2000
    for _ in range(n):
        shared = 5 * rng.standard_normal(seeds)
        off = {d: (shared + 0.3 + 0.1 * rng.standard_normal(seeds)).tolist() for d in (2, 4, 8)}
        on = {d: (shared + 0.1 * rng.standard_normal(seeds)).tolist() for d in (2, 4, 8)}
        mean = analyze.over_depths({d: analyze.subtract(off[d], on[d]) for d in off})['mean']
        hits += mean['lo'] <= 0.3 <= mean['hi']
    assert share(hits, n), hits


def test_analyze_sensitivity_interval_covers_the_truth():
    # per seed S(off) = factor x (mean rise over the grid), with E[factor] = 1: the truth is the mean rise
    rng, hits, n = np.random.default_rng(2), 0, 2000
    rise = np.maximum(0, np.log10(LRS) + 2)
    for _ in range(n):
        factors = 1 + 0.2 * rng.standard_normal(3)
        s = analyze.summary([analyze.lr_sensitivity((3 + factor * rise).tolist()) for factor in factors])
        hits += s['lo'] <= rise.mean() <= s['hi']
    assert share(hits, n), hits


def verdicts_of(study):
    analyze.measure(study)
    return [analyze.verdict_h1(study), analyze.verdict_h2(study), analyze.verdict_h3(study)]


def test_analyze_verdicts_of_a_known_trend():
    rng = np.random.default_rng(3)
    h1, h2, h3 = verdicts_of(simulated(rng, slope=-0.8, effect=2.0, spread=0.05))
    assert [v['verdict'] for v in (h1, h2, h3)] == ['supported'] * 3
    assert verdicts_of(simulated(rng, slope=0.5, effect=2.0, spread=0.05))[2]['verdict'] == 'contradicted'


def test_analyze_a_null_trend_is_mostly_undecided():
    rng, n = np.random.default_rng(4), 200
    kinds = [verdicts_of(simulated(rng, slope=0.0, effect=2.0, spread=0.1))[2]['verdict'] for _ in range(n)]
    assert kinds.count('undecided') / n > 0.95 - 3 * math.sqrt(0.95 * 0.05 / n)


def test_analyze_a_null_effect_is_undecided_and_says_never():
    h1, h2, h3 = verdicts_of(simulated(np.random.default_rng(5), effect=0.0))
    assert [v['verdict'] for v in (h1, h2, h3)] == ['undecided'] * 3
    assert "'never' at depth 2 (seed 0, 1, 2)" in h3['why'] and 'stable to the edge' in h1['why']


def altered(study, loss_of):
    """The study with the losses loss_of(arm, depth, index of the LR, seed, {cell: loss before})."""
    before = {cell: run['loss'] for cell, run in study.runs.items()}
    for (arm, depth, lr, seed), run in study.runs.items():
        run['loss'] = loss_of(arm, depth, LRS.index(lr), seed, before)
    return study


def test_analyze_h1_is_contradicted_by_a_small_gain_at_high_lr():
    def loss(arm, depth, i, seed, before):
        return before[0, depth, LRS[i], seed] - 0.02 * arm
    study = altered(simulated(np.random.default_rng(6), effect=2.0, spread=0.05), loss)
    assert verdicts_of(study)[0]['verdict'] == 'contradicted'


def test_analyze_h1_is_undecided_when_low_lrs_gain_too():
    def loss(arm, depth, i, seed, before):
        return before[arm, depth, LRS[i], seed] - 0.3 * arm
    h1 = verdicts_of(altered(simulated(np.random.default_rng(6), effect=2.0, spread=0.05), loss))[0]
    assert h1['verdict'] == 'undecided' and 'first mean' in h1['why']


def test_analyze_h2_is_contradicted_by_a_reversed_study():
    def loss(arm, depth, i, seed, before):
        return before[1 - arm, depth, LRS[i], seed]
    study = altered(simulated(np.random.default_rng(7), effect=2.0, spread=0.05), loss)
    assert verdicts_of(study)[1]['verdict'] == 'contradicted'


def test_analyze_h2_needs_both_measures():
    # the off arm is worse at the lowest LRs, and both are stable up to the edge
    def loss(arm, depth, i, seed, before):
        return 4.0 + 0.01 * seed if arm == 0 and i < 4 else 3.0
    h2 = verdicts_of(altered(simulated(np.random.default_rng(7), effect=0.0), loss))[1]
    assert h2['numbers']['S(off) - S(on)']['mean']['lo'] > 0.3
    assert h2['verdict'] == 'undecided' and h2['why'] == 'the interval of the maximum stable LR holds 0'


def test_analyze_opposite_steps_of_two_depths_are_no_effect():
    # one grid step up at one depth and the same down at the other: zero up to rounding, in every seed alike
    tops = {(0, 2): 5, (1, 2): 6, (0, 4): 6, (1, 4): 5, (0, 8): 5, (1, 8): 5}

    def loss(arm, depth, i, seed, before):
        return 9.0 if i > tops[arm, depth] else 3.0 + 1e-4 * seed
    h2 = verdicts_of(altered(simulated(np.random.default_rng(8), effect=0.0), loss))[1]
    s = h2['numbers']['ln max stable LR, on - off']['mean']
    assert abs(s['mean']) < 1e-9 and not analyze.is_above(s, 0) and not analyze.is_below(s, 0)


def test_analyze_h3_needs_both_crossings():
    # an early hump at every depth, later the deeper: the first crossing rises with depth, the last one falls
    hump = {2: 1, 4: 2, 8: 3}

    def loss(arm, depth, i, seed, before):
        return before[arm, depth, LRS[i], seed] + 0.3 * (arm == 0 and i == hump[depth])
    study = altered(simulated(np.random.default_rng(9), slope=-0.8, effect=2.0, spread=0.02), loss)
    h3 = verdicts_of(study)[2]
    assert h3['verdict'] == 'undecided' and 'do not agree' in h3['why']


def test_analyze_one_seed_or_a_missing_cell_decide_nothing():
    one = verdicts_of(simulated(np.random.default_rng(10), seeds=1, effect=2.0))
    assert all(v['verdict'] == 'undecided' and 'one seed' in v['why'] for v in one)
    study = simulated(np.random.default_rng(10), effect=2.0, spread=0.05)
    del study.runs[0, 4, 1e-2, 1]
    study.missing = [(0, 4, 1e-2, 1)]
    verdicts = verdicts_of(study)
    assert all(v['verdict'] == 'undecided' and '1 of 234 cells' in v['why'] for v in verdicts)
    assert study.arms['sensitivity'][4][0][1] is None and study.arms['sensitivity'][4][1][1] is not None
    low = verdicts[0]['numbers']["D up to off's best LR"]
    assert low['by_depth'][4]['n'] == 2 and low['by_depth'][2]['n'] == 3 and low['mean']['n'] == 2
    means = verdicts[0]['text'].partition('up to the off')[0]
    assert '(n = 2/3; depth 2: ' in means and means.count('] (3/3)') == 2 and '; depth 4: ' in means


# ---- reading

DAMAGE = {
    'empty': lambda text: '',
    'foreign': lambda text: 'epoch,loss\n1,2.0\n',
    'another tool': lambda text: "# {\"tool\": 1}\nstep\n0\n# {\"status\": \"ok\"}\n",
    'cut off': lambda text: text[:len(text) // 2],
    'no last newline': lambda text: text[:-1],
    'no footer': lambda text: text[:text.rindex('# ')],
    'broken header': lambda text: text.replace('# {', '# {,', 1),
    'a field more': lambda text: text.replace('\n50,', '\n50,1,', 1),
    'a word': lambda text: text.replace('\n50,', '\n50,x', 1),
    'steps fall back': lambda text: text.replace('\n60,', '\n40,', 1),
    'a step twice': lambda text: text.replace('\n60,', '\n50,', 1),
    'row missing at the end': lambda text: re.sub(r'\n500,.*', '', text),
    'shorter than its configuration': lambda text: text.replace('"max_iters": 500', '"max_iters": 600'),
    'other status': lambda text: text.replace('"status": "ok"', '"status": "running"'),
    'other final loss': lambda text: re.sub(r'"final_val_loss": [0-9.]+', '"final_val_loss": 1.0', text),
    'final loss nan': lambda text: re.sub(r'"final_val_loss": [0-9.]+', '"final_val_loss": NaN', text),
    'other cell': lambda text: text.replace('"seed": 1339', '"seed": 7'),
    'not text': lambda text: '\x00\x01',
    'lr a word': lambda text: text.replace('"lr": 0.01', '"lr": "fast"'),
    'no config': lambda text: text.replace('"config"', '"settings"')}


@pytest.mark.parametrize('kind', DAMAGE)
def test_analyze_leaves_out_and_names_a_damaged_log(tmp_path, kind):
    folder = write_study(tmp_path / 's', lambda *_: dict(loss=3.0), [1e-2, 1e-1], (2,), (1338, 1339))
    path = folder / 'L2_lr0.01_qk0_s1339.csv'
    whole = path.read_text()
    assert analyze.read_study(folder).left_out == {}
    path.write_text(DAMAGE[kind](whole))
    assert path.read_text() != whole
    study = analyze.read_study(folder)
    assert list(study.left_out) == [path.name] and study.left_out[path.name]
    assert study.missing == [(0, 2, 0.01, 1339)] and len(study.runs) == 7


def test_analyze_leaves_out_partials_copies_strays_and_folders(tmp_path):
    folder = write_study(tmp_path / 's', lambda *_: dict(loss=3.0), [1e-2, 1e-1], (2,), (1, 2))
    log = folder / 'L2_lr0.01_qk0_s1.csv'
    (folder / 'L2_lr0.01_qk0_s1 copy.csv').write_bytes(log.read_bytes())
    (folder / 'L2_lr0.1_qk1_s2.csv').rename(folder / 'L2_lr0.1_qk1_s2.csv.partial')
    write_log(folder, 0, 16, 1e-2, 1)
    (folder / 'a folder.csv').mkdir()
    study = analyze.read_study(folder)
    assert len(study.left_out) == 4 and len(study.runs) == 7 and study.missing == [(1, 2, 0.1, 2)]
    assert 'copy' in study.left_out['L2_lr0.01_qk0_s1 copy.csv']
    assert study.left_out['L2_lr0.1_qk1_s2.csv.partial'] == 'unfinished'
    assert 'not in the grid' in study.left_out['L16_lr0.01_qk0_s1.csv']


@pytest.mark.parametrize('change, field', [(dict(code='0ther'), 'code'), (dict(sha='0ther'), 'data sha256'),
                                           (dict(max_iters=600), 'max_iters'),
                                           (dict(device='mps'), 'device')])
def test_analyze_never_mixes_silently(tmp_path, change, field):
    def cell(arm, depth, lr, seed):
        return dict(loss=3.0, **(change if (lr, seed, arm) == (1e-1, 2, 1) else {}))
    folder = write_study(tmp_path / 's', cell, [1e-2, 1e-1], (2,), (1, 2))
    done = run_analyze(folder)
    assert_refused(done, field, 'in 7', 'in 1', '--allow-mixed')
    assert not (folder / 'results.json').exists()
    study = analyze.analyze(folder, allow_mixed=True)
    assert len(study.runs) == 8 and f'Mixed logs were allowed: {field}' in analyze.report(study)


def test_analyze_logs_of_other_code_than_the_plan(tmp_path):
    folder = write_study(tmp_path / 's', lambda *_: dict(loss=3.0), [1e-2, 1e-1], (2,), (1, 2), code='new')
    assert_refused(run_analyze(folder), 'code new in 8', 'plan.txt: c0de')


def test_analyze_bad_input_is_one_line(tmp_path):
    assert_refused(start_analyze(tmp_path / 'nowhere'), 'is not a folder')
    assert_refused(run_analyze(tmp_path), 'no finished log')
    (tmp_path / 'L2_lr0.01_qk0_s1.csv').write_text('')
    assert_refused(run_analyze(tmp_path), 'L2_lr0.01_qk0_s1.csv: empty')
    (tmp_path / 'L2_lr0.01_qk0_s1.csv').write_text('a,b\n1,2\n')
    assert_refused(run_analyze(tmp_path), 'not a log of qkgpt.py')
    assert_refused(run_analyze(tmp_path / 'L2_lr0.01_qk0_s1.csv'), 'is not a folder')
    assert_refused(run_analyze(), 'logs/cpu')
    for flag in ('--no-such-flag', '--sugg'):
        assert_refused(run_analyze(flag, tmp_path), flag)
    write_log(tmp_path, 0, 2, 1e-2, 1)
    for plan in ('lrs 0.01 fast\ndepths 2\nseeds 1\n', 'lrs 0.01\ndepths 0\nseeds 1\n',
                 'lrs 0.01\ndepths 2\n', 'lrs inf\ndepths 2\nseeds 1\n', 'lrs nan\ndepths 2\nseeds 1\n',
                 'lrs 1e300\ndepths 2\nseeds 1\n', f'lrs 0.01\ndepths {10**400}\nseeds 1\n'):
        (tmp_path / 'plan.txt').write_text(plan)
        assert_refused(run_analyze(tmp_path), 'plan.txt')
    assert {p.name for p in tmp_path.iterdir()} == {'L2_lr0.01_qk0_s1.csv', 'plan.txt'}


def test_analyze_without_a_plan_says_so(tmp_path):
    folder = write_study(tmp_path / 's', lambda *_: dict(loss=3.0), [1e-2, 1e-1], (2,), (1, 2))
    (folder / 'plan.txt').unlink()
    (folder / 'L2_lr0.1_qk1_s2.csv').unlink()
    study = analyze.analyze(folder)
    assert study.missing == [(1, 2, 0.1, 2)] and 'no plan.txt' in analyze.coverage_text(study)


# ---- what it writes

def test_analyze_needs_neither_torch_nor_qkgpt(study_folder):
    code = ('import sys; import analyze; study = analyze.analyze(sys.argv[1])\n'
            "print({'torch', 'qkgpt', 'matplotlib', 'scipy', 'pandas'} & set(sys.modules))")
    done = subprocess.run([sys.executable, '-c', code, study_folder[0]], capture_output=True, text=True,
                          cwd=Path(analyze.__file__).resolve().parent)
    assert done.stdout == 'set()\n', done


def test_analyze_writes_a_whole_study(study_folder):
    folder, stdout = study_folder
    names = ('fig1_loss', 'fig2_sensitivity', 'fig3_necessity', 'fig4_mechanism', 'fig5_curves')
    figures = {f'{name}.{kind}' for name in names for kind in ('pdf', 'png', 'csv')}
    assert {p.name for p in (folder / 'figures').iterdir()} == figures
    found = results(folder)
    assert [found['verdicts'][name]['verdict'] for name in ('H1', 'H2', 'H3')] == ['supported'] * 3
    report = (folder / 'report.md').read_text()
    for verdict in found['verdicts'].values():
        assert verdict['text'] in report and verdict['text'] in ' '.join(stdout.split())
    assert found['missing'] == [] and len(found['cells']) == 234
    cell = found['by_lr']['4']['0.01']['loss']
    losses, on = ([lifelike(arm, 4, 1e-2, s)['loss'] for s in (1337, 1338, 1339)] for arm in (0, 1))
    assert cell['off']['mean'] == pytest.approx(np.mean(losses)) and cell['off']['n'] == 3
    differences = np.subtract(on, losses)
    half = 4.302653 * np.std(differences, ddof=1) / math.sqrt(3)
    assert cell['on - off']['mean'] == pytest.approx(np.mean(differences))
    assert cell['on - off']['hi'] == pytest.approx(np.mean(differences) + half)
    sensitivity, top = (found['measures'][name]['4'] for name in ('sensitivity', 'max_stable_0.5'))
    off, on = sensitivity['off']['mean'], sensitivity['on']['mean']
    assert sensitivity['on - off']['mean'] == pytest.approx(on - off) and off > on
    assert top['on / off']['mean'] == pytest.approx(top['on']['mean'] / top['off']['mean'])
    assert top['off']['mean'] == pytest.approx(np.prod(top['off']['per_seed']) ** (1 / 3))
    crossing = found['measures']['necessity_last']['4']
    product = np.prod([float(v) for v in crossing['per_seed']])
    assert crossing['mean'] == pytest.approx(product ** (1 / 3), rel=1e-3) and crossing['lo'] > 0
    for text in (report, (folder / 'tables.md').read_text()):
        assert '| 0.01 |' in text and f'{np.mean(losses):.3f}' in text
    tex = (folder / 'tables.tex').read_text()
    assert tex.count(r'\toprule') == tex.count(r'\bottomrule') == tex.count(r'\end{table*}') == 4
    for line in tex.splitlines():
        if line.endswith(r' \\'):
            assert not re.search(r'(?<!\\)[%&_#]|<=|>=', line.replace(' & ', ''))
    rows = [line.split(',') for line in (folder / 'figures/fig1_loss.csv').read_text().splitlines()]
    assert rows[0][:5] == ['depth', 'lr', 'arm', 'seed', 'status'] and len(rows) == 235


def test_analyze_is_byte_identical_on_every_run(study_folder, tmp_path):
    folder, _ = study_folder
    other = tmp_path / 'elsewhere' / 'cpu'
    other.mkdir(parents=True)
    sources = [p for p in folder.iterdir() if p.suffix == '.csv' or p.name == 'plan.txt']
    for path in sorted(sources, reverse=True):  # another order of files on disk
        (other / path.name).write_bytes(path.read_bytes())
    assert start_analyze(other).returncode == 0
    for path in folder.rglob('*'):
        if path.is_file():
            assert path.read_bytes() == (other / path.relative_to(folder)).read_bytes(), path.name


def test_analyze_figures_hold_truetype_fonts_only(study_folder):
    for path in (study_folder[0] / 'figures').glob('*.pdf'):
        data = path.read_bytes()
        assert b'/Type3' not in data and b'/Subtype /Type3' not in data and b'/FontFile2' in data
        assert b'STIXGeneral' in data and b'CreationDate' not in data
        box = [float(v) for v in re.search(rb'/MediaBox \[([^\]]*)\]', data).group(1).split()]
        assert box[2] / 72 == pytest.approx(3.5, abs=0.01) or box[2] / 72 == pytest.approx(7.16, abs=0.01)


def test_analyze_shows_missing_and_diverged_cells(tmp_path):
    def cell(arm, depth, lr, seed):
        if (arm, depth, lr, seed) == (1, 4, 1e-2, 2):
            return None
        return dict(diverged_at=130) if arm == 0 and lr == 1e-1 and seed > 1 else dict(loss=3.0 + lr)
    folder = write_study(tmp_path / 's', cell, [1e-3, 1e-2, 1e-1], (2, 4), (1, 2, 3))
    done = run_analyze(folder)
    stdout = ' '.join(done.stdout.split())
    assert done.returncode == 0 and '35 of 36 cells' in stdout and '4 of 18 off, 0 of 17 on' in stdout
    report = (folder / 'report.md').read_text()
    assert '| 4 | on | 3/3 | 2/3 | 3/3 |' in report and '| 2 | off | 3/3 | 3/3 | 3/3 2d |' in report
    assert '| 0.1 | 6.100, 2 of 3 div. | 3.100 | 6.100, 2 of 3 div. | 3.100 |' in report
    assert '3.010 (2/3)' in report and results(folder)['missing'] == ['L4_lr0.01_qk1_s2']
    rows = (folder / 'figures/fig1_loss.csv').read_text().splitlines()
    assert '4,0.01,on,2,missing,,,,' in rows
    assert f'2,0.1,off,3,diverged,7.6,{math.exp(7.6):.9g},3.8,7.6' in rows


@pytest.mark.parametrize('lrs, depths, seeds', [([1e-2], (2,), (1,)), (LRS, (2, 8), (1337,))])
def test_analyze_small_studies_have_all_figures(tmp_path, lrs, depths, seeds):
    folder = write_study(tmp_path / 's', lifelike, lrs, depths, seeds)
    done = run_analyze(folder)
    assert done.returncode == 0 and not done.stderr and len(list((folder / 'figures').iterdir())) == 15


def test_analyze_suggest_halves_the_brackets(tmp_path):
    # off is stable up to 0.01 and rises beyond, on never rises: both brackets are 0.01 to 0.1
    def cell(arm, depth, lr, seed):
        return dict(loss=5.0 if arm == 0 and lr > 0.05 else 3.0)
    folder = write_study(tmp_path / 's', cell, [1e-3, 1e-2, 1e-1], (2, 4), (1, 2))
    done = run_analyze(folder, '--suggest')
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == 'LRS="0.001 0.01 0.0316 0.1"'
    comments = done.stdout.splitlines()[:-1]
    assert len(comments) == 1 and comments[0].startswith('# 0.0316 halves 0.01 to 0.1: ')
    assert not (folder / 'results.json').exists()
    shell = subprocess.run(['sh', '-c', done.stdout + 'echo "$LRS"'], capture_output=True, text=True)
    assert shell.stdout == '0.001 0.01 0.0316 0.1\n'


def test_analyze_compare(tmp_path):
    grid = ([1e-3, 1e-2, 1e-1], (2, 4), (1337, 1338))
    a, b = (write_study(tmp_path / name, lifelike, *grid) for name in 'ab')  # other times, the same numbers
    done = run_analyze('--compare', a, b)
    assert done.returncode == 0 and 'identical: 24 of 24 cells\n' in done.stdout
    assert done.stdout.count('they agree') == 3
    changed = lifelike(0, 4, 1e-2, 1338)
    write_log(b, 0, 4, 1e-2, 1338, **{**changed, 'loss': changed['loss'] + 0.25})
    (b / 'L2_lr0.01_qk0_s1337.csv').unlink()
    done = run_analyze('--compare', a, b)
    assert '23 cells in both, 1 only in' in done.stdout
    assert 'identical: 22 of 23 cells; the others differ in final loss by at most 0.25 nats' in done.stdout
    assert 'L4_lr0.01_qk0_s1338: loss' in done.stdout and '(+0.25 nats)' in done.stdout
    other = write_study(tmp_path / 'c', lifelike, [1e-3, 1e-2], *grid[1:])
    assert_refused(run_analyze('--compare', a, other), 'different grids: lrs 0.001 0.01 0.1 / 0.001 0.01')
    assert_refused(run_analyze('--compare', a, b, other), f'{other} is a third')
    assert_refused(run_analyze('--readme', '--suggest', a), 'one at a time')
    reverse = write_study(tmp_path / 'd', lambda arm, *rest: lifelike(1 - arm, *rest), *grid)
    done = run_analyze('--compare', a, reverse)
    assert done.returncode == 1 and 'do not agree' in done.stdout


def test_analyze_readme_is_rewritten_and_staleness_is_seen(tmp_path):
    folder = write_study(tmp_path / 'logs' / 'cpu', lifelike, [1e-3, 1e-2, 1e-1], (2, 4), (1337, 1338))
    readme = tmp_path / 'README.md'
    assert_refused(start_analyze('--readme', cwd=tmp_path), 'README.md')
    readme.write_text('# Title\nno markers\n')
    assert_refused(start_analyze('--readme', cwd=tmp_path), 'results:begin')
    assert readme.read_text() == '# Title\nno markers\n'
    readme.write_text('# Title\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n')
    assert start_analyze('--readme', cwd=tmp_path).returncode == 0
    text = readme.read_text()
    assert text.startswith('# Title\n<!-- results:begin -->\n')
    assert text.endswith('<!-- results:end -->\nafter\n')
    assert 'old' not in text.splitlines() and 'H3 (' in text and 'LR sensitivity' in text
    assert start_analyze('--readme', cwd=tmp_path).returncode == 0
    assert readme.read_text() == text  # a second time changes nothing
    write_log(folder, 0, 2, 1e-2, 1337, loss=4.0)
    assert analyze.with_results(text, analyze.analyze(folder)) != text


def test_analyze_readme_compares_a_variant_with_the_study_on_its_grid(tmp_path):
    def cell(arm, depth, lr, seed):
        return dict(loss=3 + lr * (2 - arm) * depth + seed / 99, warmup_ratio=0.3)

    def variant(arm, depth, lr, seed):
        return dict(loss=3 + lr * (5 - arm) + seed / 99, warmup_ratio=0.05)

    lrs, seeds = [1e-3, 1e-2, 1e-1], (1, 2)
    folder = write_study(tmp_path / 'cpu', cell, lrs, (2, 4), seeds)
    plain = analyze.with_results(f'{analyze.BEGIN}\n{analyze.END}', analyze.analyze(folder))
    assert 'Other settings' not in plain
    (tmp_path / 'cpu-begun').mkdir()  # has no finished run yet
    write_study(tmp_path / 'cpu-short', variant, lrs[1:], (4,), seeds)
    text = analyze.with_results(f'{analyze.BEGIN}\n{analyze.END}', analyze.analyze(folder))
    assert text.startswith(plain[:plain.index(analyze.END)]) and 'cpu-short: LRs 0.01 0.1, depth 4' in text
    rows = [line.split(' | ') for line in text.splitlines() if line.startswith('| cpu')]
    assert [row[0] for row in rows] == ['| cpu', '| cpu-short']
    assert rows[1][1] == 'warmup_ratio 0.3, here 0.05' and [row[-1] for row in rows] == ['2/2 |'] * 2
    # S: the mean excess over the best of the two LRs; off has 4 * 0.09 / 2 more in cpu, 0.09 / 2 in the other
    assert rows[0][4].startswith('0.180 [') and rows[1][4].startswith('0.045 [')
    write_study(tmp_path / 'cpu-short2', variant, lrs[1:], (4,), seeds)
    write_study(tmp_path / 'cpu-wide', variant, lrs, (4,), seeds)
    rows = analyze.variant_table(analyze.analyze(folder))[2]  # the study once for each grid
    assert [row[0] for row in rows] == ['cpu', 'cpu-short', 'cpu-short2', 'cpu', 'cpu-wide']


@pytest.mark.skipif(not Path('README.md').exists() or not Path('logs/cpu').exists(), reason='no results yet')
def test_analyze_the_readme_is_not_stale():
    text = Path('README.md').read_text(encoding='utf-8')
    assert analyze.with_results(text, analyze.analyze('logs/cpu')) == text, 'run python analyze.py --readme'


def test_analyze_refuses_missing_rows_and_emptied_evaluations(tmp_path):
    path = write_log(tmp_path, 0, 2, 1e-2, 1)
    lines = path.read_text().split('\n')
    assert analyze.read_log(path)['loss'] == pytest.approx(3.0)
    emptied = lines[27].split(',')  # step 250
    emptied[COLUMNS.index('val_loss')] = ''
    doubled = [line if line[:1] in '#' else line + ',' + line.split(',')[5] for line in lines]
    cases = {'step 10 is missing': lines[:3] + lines[4:],
             'val_loss is empty': lines[:27] + [','.join(emptied)] + lines[28:],
             'a column stands there twice': doubled,
             'data': [lines[0].replace('"data":', '"other":')] + lines[1:]}
    for reason, damaged in cases.items():
        path.write_text('\n'.join(damaged))
        with pytest.raises(ValueError, match=reason):
            analyze.read_log(path)
    path.write_bytes('\n'.join(lines).encode().replace(b'AMD', b'\xff\xfe'))
    with pytest.raises(ValueError, match='UTF-8'):
        analyze.read_log(path)
