# Qwen2 0.5B and Qwen2.5 0.5B: 494 032 768 parameters with an embedding of 151936 rows.
# Use: source scripts/models/qwen2_0.5b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 896
    --num-attention-heads 14 --num-query-groups 2
    --seq-length 4096
    --ffn-hidden-size 4864
    --max-position-embeddings 32768
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --attention-dropout 0 --hidden-dropout 0
)
