"""
Speed as ratios, each within one process or between alternating ones, so that they carry over to other machines:

    NANOGPT=path/to/karpathy/nanoGPT python .ci/bench.py [rounds]

1. forward + backward + AdamW step: --qknorm 0 against stock nanoGPT's model, --qknorm 1 against --qknorm 0, and the share
   of the machine's float32 matrix product rate that the step reaches; at the cpu study's and the paper cell's sizes.
2. whole runs against stock train.py doing the same updates (d 128, 4 layers, batch 16 x 128, toy corpus).
3. the cost of the probes as a share of a run.

Medians of interleaved rounds. One thread, since the cpu study runs one cell a core.
"""

import importlib.util
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import qkgpt

NANOGPT = Path(os.environ.get('NANOGPT', 'nanoGPT'))
SIZES = {
    'cpu study, 4 layers': dict(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=2048, batch_size=16,
                                eval_interval=50),
    'paper cell, batch 4 of 64': dict(n_layer=8, n_head=5, n_embd=320, block_size=256, vocab_size=8192, batch_size=4),
}


def stock_model():
    spec = importlib.util.spec_from_file_location('nanogpt_model', NANOGPT / 'model.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def timed(f):
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def interleaved(functions, rounds):
    """{name: f} -> {name: [seconds of each round]}, after one round that does not count."""
    seconds = {name: [] for name in functions}
    for i in range(rounds + 1):
        for name, f in functions.items():
            s = timed(f)
            if i:
                seconds[name].append(s)
    return seconds


def ratio(seconds, a, b):
    """Median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(seconds[a], seconds[b]))


def matmul_rate():
    """The best rate (flop/s) of square float32 products."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / min(timed(lambda: a @ b) for _ in range(20))


def step_of(model, cfg, x, y):
    optimizer = model.configure_optimizers(cfg.weight_decay, cfg.lr, (cfg.beta1, cfg.beta2), 'cpu')

    def step():
        model(x, y)[1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def bench_step(name, size, stock, rounds):
    cfg = qkgpt.Config(**size)
    ids = torch.randint(cfg.vocab_size, (cfg.batch_size, cfg.block_size + 1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    fields = stock.GPTConfig.__dataclass_fields__
    models = {'stock': stock.GPT(stock.GPTConfig(**{k: getattr(cfg, k) for k in fields}))}
    for arm in (0, 1):
        cfg.qknorm = bool(arm)
        models[f'qknorm {arm}'] = qkgpt.GPT(cfg)
    seconds = interleaved({arm: step_of(model, cfg, x, y) for arm, model in models.items()}, rounds)
    # matrix products alone: 6 per parameter of a Linear layer (the head among them), and causal attention's half
    params = qkgpt.param_counts(models['stock'])['n_params_nonemb'] + cfg.vocab_size * cfg.n_embd
    flops = x.numel() * (6 * params + 6 * cfg.n_layer * cfg.n_embd * cfg.block_size)
    share = flops / statistics.median(seconds['qknorm 0']) / matmul_rate()
    print(f'{name}: step {1e3 * statistics.median(seconds["qknorm 0"]):.1f} ms | qknorm 0 / stock '
          f'{ratio(seconds, "qknorm 0", "stock"):.3f} | qknorm 1 / qknorm 0 {ratio(seconds, "qknorm 1", "qknorm 0"):.3f} '
          f'| {100 * share:.0f} % of the matrix product rate')
    model = models['qknorm 1']
    probe_s = statistics.median(timed(lambda: qkgpt.probe(model, x)) for _ in range(3))
    between_s = cfg.eval_interval * statistics.median(seconds['qknorm 1'])
    print(f'{name}: the probes of one evaluation take {100 * probe_s / between_s:.2f} % of the training between two')


def bench_runs(rounds):
    """Whole processes, imports included, with the same 101 updates (stock's max_iters 100) and five evaluations.
    Stock's are of 20 batches of train and 20 of val, and it saves a checkpoint when val improves; ours are of val alone,
    with the probes, and the data are hashed and a sample is printed."""
    with tempfile.TemporaryDirectory() as tmp:
        home = Path(tmp) / 'nanoGPT'
        shutil.copytree(NANOGPT, home, ignore=shutil.ignore_patterns('.git', 'assets'))
        data = home / 'data' / 'bench'
        data.mkdir()
        prepared = qkgpt.prepare('toy', 257, str(ROOT / 'data'))
        for part in ('train.bin', 'val.bin'):
            shutil.copy(Path(prepared) / part, data)
        (data / 'meta.pkl').write_bytes(pickle.dumps(dict(vocab_size=257)))
        shape = dict(n_layer=4, n_head=4, n_embd=128, block_size=128, batch_size=16, gradient_accumulation_steps=1,
                     log_interval=10)
        env = dict(os.environ, OMP_NUM_THREADS='1')

        def stock():
            flags = dict(shape, dataset='bench', device='cpu', compile=False, dtype='float32', dropout=0.0,
                         always_save_checkpoint=False, out_dir='out', max_iters=100, eval_interval=25, eval_iters=20)
            command = [sys.executable, 'train.py'] + [f'--{k}={v}' for k, v in flags.items()]
            subprocess.run(command, cwd=home, env=env, check=True, capture_output=True)

        def ours(eval_iters):
            flags = dict(shape, dataset='toy', device='cpu', threads=1, out_dir=tmp, overwrite=1, max_iters=101,
                         eval_interval=26, eval_iters=eval_iters)
            command = [sys.executable, str(ROOT / 'qkgpt.py')]
            command += [word for k, v in flags.items() for word in (f'--{k}', str(v))]
            subprocess.run(command, env=env, check=True, capture_output=True)

        seconds = interleaved({'stock': stock, 'as many batches of val as stock of both': lambda: ours(40),
                               "as many batches of val as stock's": lambda: ours(20),
                               'our default, 10 batches': lambda: ours(10)}, rounds)
        for name in list(seconds)[1:]:
            print(f'whole run, {name}: stock {statistics.median(seconds["stock"]):.1f} s, ours '
                  f'{statistics.median(seconds[name]):.1f} s, stock / ours {ratio(seconds, "stock", name):.2f}')


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    if not (NANOGPT / 'model.py').exists():
        sys.exit(f'NANOGPT: {NANOGPT}: a checkout of karpathy/nanoGPT')
    torch.set_num_threads(1)
    stock = stock_model()
    for name, size in SIZES.items():
        bench_step(name, size, stock, rounds)
    bench_runs(max(3, rounds // 3))


if __name__ == '__main__':
    main()
