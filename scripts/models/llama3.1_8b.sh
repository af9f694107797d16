# Llama 3.1 8B: 8 030 261 248 parameters with its vocabulary of 128256 ids. Llama 3 is the same without --use-rope-scaling.
# Use: source scripts/models/llama3.1_8b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32 --num-query-groups 8
    --seq-length 8192
    --ffn-hidden-size 14336
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 500000
    --use-rope-scaling --rope-scaling-factor 8
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
