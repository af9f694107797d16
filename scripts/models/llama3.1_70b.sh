# Llama 3.1 70B: 70 553 706 496 parameters with its vocabulary of 128256 ids. Llama 3 is the same without --use-rope-scaling.
# The 8 ranks of a node share its layers, as is usual for this size; --tensor-model-parallel-size 1 after it undoes that.
# Use: source scripts/models/llama3.1_70b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --num-attention-heads 64 --num-query-groups 8
    --seq-length 8192
    --ffn-hidden-size 28672
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 500000
    --use-rope-scaling --rope-scaling-factor 8
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --tensor-model-parallel-size 8 --sequence-parallel
)
