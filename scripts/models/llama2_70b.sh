# Llama 2 70B: 68 976 648 192 parameters with its vocabulary of 32000 ids.
# The 8 ranks of a node share its layers, as is usual for this size; --tensor-model-parallel-size 1 after it undoes that.
# Use: source scripts/models/llama2_70b.sh; torchrun ... pretrain_zeropp_gpt.py "${MODEL_ARGS[@]}" ... Later flags win.
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --num-attention-heads 64 --num-query-groups 8
    --seq-length 4096
    --ffn-hidden-size 28672
    --position-embedding-type rope
    --normalization RMSNorm --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --tensor-model-parallel-size 8 --sequence-parallel
)
