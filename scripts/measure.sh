#!/usr/bin/env bash
# Every figure that the project quotes, measured in one go on a GPU machine:
#   scripts/measure.sh [example] [bench] [long] [shapes] [gemv] [report] [ab] [slow] [aa]
# (default: all, in this order). JSON, Markdown and HTML go to scripts/results/<gpu>/; where $OUT is
# set, they are packed into $OUT/results.tar after each command, so that a run cut short keeps them.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
all=(example bench long shapes gemv report ab slow aa)
for part in "${@:-${all[@]}}"; do
  if [[ " ${all[*]} " != *" $part "* ]]; then
    echo "measure.sh: no part $part; there are ${all[*]}" >&2
    exit 2
  fi
done
if ! gpu=$("$python" -c 'import torch
print(torch.cuda.get_device_name(0).split()[-1].lower())' 2>/dev/null); then
  echo "measure.sh: torch sees no CUDA GPU here; nothing was run" >&2
  exit 5
fi
results=scripts/results/$gpu
mkdir -p "$results"
failed=0

# keep FILE COMMAND...: the command's stdout in FILE, its last words if it fails.
keep() {
  local file=$results/$1 begin=$SECONDS errors
  errors=$(mktemp)
  shift
  if timeout "${LIMIT:-150}" "$python" "$@" >"$file" 2>"$errors"; then
    echo "$file ($((SECONDS - begin)) s)"
  else
    echo "$file FAILED ($((SECONDS - begin)) s): $(tail -n 2 "$errors")"
    failed=1
  fi
  rm -f "$errors"
  if [ -n "${OUT:-}" ]; then tar -cf "$OUT/results.tar" -C scripts results; fi
}

run=(-m minidecode)
small=synthetic:smollm2-135m
models=("$small" synthetic:llama-3.2-1b synthetic:llama-3.1-8b)
sets=fused,half2_stream,half2_block,cublas

example() { # the same text from three kernel sets
  for kernel in half2_block cublas fused; do
    keep "generate-$kernel.json" "${run[@]}" generate --kernel "$kernel" --json \
      --prompt "The capital of France is" --max-new-tokens 40
  done
}
bench() {
  for model in "${models[@]}"; do
    keep "bench-${model#*:}.json" "${run[@]}" bench -m "$model" -p 0 -d 128 -n 128 -r 5 \
      --kernel "$sets" -o json
  done
}
long() { # 16,000 tokens in the cache
  for model in "${models[@]:1}"; do
    keep "bench-${model#*:}-16k.json" "${run[@]}" bench -m "$model" -p 0 -d 16000 -n 128 -r 3 \
      --kernel fused -o json
  done
}
shapes() { # other families, and every linear layer's shape alone
  for model in synthetic:qwen3-0.6b synthetic:qwen2.5-7b synthetic:mistral-7b; do
    keep "bench-${model#*:}.json" "${run[@]}" bench -m "$model" -p 0 -d 128 -n 128 -r 3 \
      --kernel fused,cublas -o json
  done
  for model in "${models[@]}" synthetic:llama-3.2-3b synthetic:mistral-7b; do
    keep "gemv-${model#*:}.md" "${run[@]}" gemv -m "$model" \
      --kernel half2_stream,cublas,half2_block -o md
  done
}
gemv() {
  keep gemv.md "${run[@]}" gemv --dtype both -o md \
    --kernel naive,column_atomic,shared_tree,warp_row,half2_block,half2_stream,triton_rowblock,cublas
}
report() {
  for model in example "${models[2]}"; do
    local name=${model#*:}
    keep "report-$name.txt" "${run[@]}" report -m "$model" -d 128 --vs cublas \
      --json "$results/report-$name.json" --html "$results/report-$name.html"
  done
}
ab() {
  for model in example "${models[2]}"; do
    local name=${model#*:}
    keep "ab-$name-half2_block.txt" "${run[@]}" ab cublas half2_block -m "$model" \
      --json "$results/ab-$name-half2_block.json"
    keep "ab-$name-fused.txt" "${run[@]}" ab cublas fused -m "$model" \
      --json "$results/ab-$name-fused.json"
    keep "ab-$name-user.txt" "${run[@]}" ab half2_block tests/fixtures/hostile/right.cu \
      -m "$model" --json "$results/ab-$name-user.json"
  done
}
slow() { # a right kernel at half the speed, in one layer, is found there
  local right=tests/fixtures/hostile/hostile.py:right half=tests/fixtures/user_kernels.py:half_as_fast
  keep slow-report.txt "${run[@]}" report -m "${models[2]}" --kernel "$right" --vs "$half" \
    --only down_proj
  keep slow-ab.txt "${run[@]}" ab "$right" "$half" --only down_proj -m "${models[2]}"
}
aa() { # ten runs of a kernel set against itself
  for i in 0 1 2 3 4 5 6 7 8 9; do
    keep "aa-$i.json" "${run[@]}" ab fused fused -m "${models[2]}" -q --json -
  done
}

for part in "${@:-${all[@]}}"; do "$part"; done
exit "$failed"
