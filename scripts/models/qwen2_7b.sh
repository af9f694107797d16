# Qwen2 7B and Qwen2.5 7B: 7 615 616 512 parameters with an embedding of 152064 rows.
# Use: source scripts/models/qwen2_7b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --num-attention-heads 28 --num-query-groups 4
    --seq-length 4096
    --ffn-hidden-size 18944
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --add-qkv-bias
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
