// A plain CUDA stand-in with the launch signature of the decode kernels, to try the runtime on any
// GPU with tensor maps. One thread block of a cluster holds 64 of a tile's 128 rows; nothing overlaps
// and the products run on scalar units. Page size, row order and mask come as macros.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#ifndef PAGE
#define PAGE 64
#endif
#ifndef PACKED
#define PACKED 0
#endif
#ifndef CAUSAL
#define CAUSAL 1
#endif

constexpr int kRows = 64, kKeys = 128, kBlock = 128, kBlocks = 4;
constexpr int kBox = PAGE < 64 ? PAGE : 64;
constexpr int kThreads = 256, kColumns = 128;  // a thread: one row, a quarter of the columns

__device__ float e4m3(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

__device__ float rounded(float p) { return e4m3(__nv_cvt_float_to_fp8(p, __NV_SATFINITE, __NV_E4M3)); }

// Byte `column` of row `row` of a tile of `rows` rows: latent blocks (128B swizzle), then rope (64B).
__device__ float element(const uint8_t* tile, int rows, int row, int column) {
    uintptr_t at;
    if (column < 512) {
        at = uintptr_t(tile) + (column / kBlock * rows + row) * kBlock + column % kBlock;
        at ^= (at >> 7 & 7) << 4;
    } else {
        at = uintptr_t(tile) + kBlocks * rows * kBlock + row * 64 + column - 512;
        at ^= (at >> 7 & 3) << 4;
    }
    return e4m3(*reinterpret_cast<const uint8_t*>(at));
}

__device__ uint32_t shared(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ void load(void* to, const CUtensorMap& map, uint64_t* full, int c, int row, int page) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared(to)), "l"(&map), "r"(shared(full)),
        "r"(c), "r"(row), "r"(page) : "memory");
}

__device__ void load(void* to, const CUtensorMap& map, uint64_t* full, int c, int row, int outer,
                     int tile, int request) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared(to)), "l"(&map), "r"(shared(full)),
        "r"(c), "r"(row), "r"(outer), "r"(tile), "r"(request) : "memory");
}

__device__ void expect(uint64_t* full, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared(full)), "r"(bytes)
                 : "memory");
}

__device__ void wait(uint64_t* full, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared(full)), "r"(parity) : "memory");
}

__device__ float log2_or_minus_infinity(float x) { return x > 0 ? log2f(x) : -INFINITY; }

__device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The division of a request's key tiles: `per` in a run, `count` runs that hold keys.
struct Runs {
    int tiles, per, count;
    __device__ Runs(int length, int splits, const int* block_split_kvs, int request) {
        if (block_split_kvs) splits = max(1, min(block_split_kvs[request], splits));
        tiles = ceil_div(length, kKeys);
        per = ceil_div(tiles, splits);
        count = tiles ? ceil_div(tiles, per) : 0;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads) stand_in_attention(
    const __grid_constant__ CUtensorMap q_latent, const __grid_constant__ CUtensorMap q_rope,
    const __grid_constant__ CUtensorMap c_latent, const __grid_constant__ CUtensorMap c_rope,
    const int* block_tables, const int* seq_lens, __nv_bfloat16* out, float* lse,
    float* partial_out, float* partial_lse, int batch, int num_heads, int seq_len_q,
    int query_tiles, int tile_rows, int splits, const int* block_split_kvs, int q_row_extent,
    int q_box_rows, int64_t block_table_stride, int64_t out_stride_batch, int64_t out_stride_token,
    int64_t out_stride_head, float output_scale, float lse_factor, float softmax_scale_log2,
    float rescale_threshold, float p_prescale_log2) {
    extern __shared__ uint8_t raw[];
    uint8_t* q = reinterpret_cast<uint8_t*>((uintptr_t(raw) + 1023) / 1024 * 1024);
    uint8_t* k = q + kRows * 576;
    float* scores = reinterpret_cast<float*>(k + kKeys * 576);
    __shared__ uint64_t full;
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int tile = blockIdx.x / 2, split = blockIdx.y, request = blockIdx.z;
    const int length = seq_lens[request];
    const Runs runs(length, splits, block_split_kvs, request);
    const int first = split * runs.per, last = min(first + runs.per, runs.tiles);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared(&full)));
        asm volatile("fence.mbarrier_init.release.cluster;");
        expect(&full, kRows * 576);
        for (int row = 0; row < kRows; row += q_box_rows) {
            int at = rank * kRows + row, outer = 0, index = tile;
            if (PACKED) {
                at += tile * tile_rows, index = 0;
            } else {
                outer = at / q_row_extent, at %= q_row_extent;
            }
            for (int b = 0; b < kBlocks; ++b)
                load(q + (b * kRows + row) * kBlock, q_latent, &full, b * kBlock, at, outer, index, request);
            load(q + kBlocks * kRows * kBlock + row * 64, q_rope, &full, 0, at, outer, index, request);
        }
    }
    __syncthreads();
    wait(&full, 0);

    const int row = threadIdx.x / 4, quarter = threadIdx.x % 4;
    const int in_tile = rank * kRows + row, position = tile * tile_rows + in_tile;
    const int token = position / num_heads, head = position % num_heads;
    const bool exists = in_tile < tile_rows && token < seq_len_q;
    const int upper = CAUSAL ? length - (seq_len_q - 1) + token : length;
    float top = -INFINITY, total = 0, o[kColumns] = {};
    for (int t = first, phase = 1; t < last; ++t, phase ^= 1) {
        if (threadIdx.x == 0) {
            expect(&full, kKeys * 576);
            for (int key = 0; key < kKeys; key += kBox) {
                const int at = t * kKeys + key;
                const int page = at < length ? block_tables[request * block_table_stride + at / PAGE] : -1;
                for (int b = 0; b < kBlocks; ++b)
                    load(k + (b * kKeys + key) * kBlock, c_latent, &full, b * kBlock, at % PAGE, page);
                load(k + kBlocks * kKeys * kBlock + key * 64, c_rope, &full, 0, at % PAGE, page);
            }
        }
        wait(&full, phase);
        const int seen = max(0, min(kKeys, upper - t * kKeys));
        float tile_top = -INFINITY;
        for (int key = quarter; key < seen; key += 4) {
            float s = 0;
            for (int c = 0; c < 576; ++c) s += element(q, kRows, row, c) * element(k, kKeys, key, c);
            scores[row * kKeys + key] = s;
            tile_top = fmaxf(tile_top, s);
        }
        tile_top = fmaxf(tile_top, __shfl_xor_sync(~0u, tile_top, 1));
        tile_top = fmaxf(tile_top, __shfl_xor_sync(~0u, tile_top, 2));
        float factor = 1;
        if (seen && (top == -INFINITY || (tile_top - top) * softmax_scale_log2 > rescale_threshold)) {
            factor = top == -INFINITY ? 0 : exp2f((top - tile_top) * softmax_scale_log2);
            top = tile_top;
        }
        __syncwarp();
        total *= factor;
        for (int c = 0; c < kColumns; ++c) o[c] *= factor;
        for (int key = 0; key < seen; ++key) {
            const float p = exp2f((scores[row * kKeys + key] - top) * softmax_scale_log2 + p_prescale_log2);
            const float r = rounded(p);
            total += p;
            for (int c = 0; c < kColumns; ++c) o[c] += r * element(k, kKeys, key, quarter * kColumns + c);
        }
        __syncthreads();  // the tile is reused
    }
    if (!exists) return;
    const float inverse = total > 0 ? 1 / total : 0;
    const float log_sum = log2_or_minus_infinity(total) - p_prescale_log2 +
                          (top == -INFINITY ? 0 : top * softmax_scale_log2);
    const int64_t flat = (int64_t(request) * seq_len_q + token) * num_heads + head;
    const bool final = runs.count <= 1;
    if (first >= last && !(final && split == 0)) return;
    if (!final) {
        const int slot = (request * query_tiles + tile) * splits + split;
        const int64_t part = int64_t(slot) * tile_rows + in_tile;
        for (int c = 0; c < kColumns; ++c) partial_out[part * 512 + quarter * kColumns + c] = o[c] * inverse;
        if (quarter == 0) partial_lse[part] = log_sum;
        return;
    }
    __nv_bfloat16* to = out + request * out_stride_batch + token * out_stride_token + head * out_stride_head;
    for (int c = 0; c < kColumns; ++c)
        to[quarter * kColumns + c] = __float2bfloat16(o[c] * inverse * output_scale);
    if (lse && quarter == 0) lse[flat] = log_sum * lse_factor;
}

// One block for each output row and band of columns.
#define COMBINE(NAME, BANDS)                                                                          \
    extern "C" __global__ void NAME(                                                                  \
        const int* seq_lens, __nv_bfloat16* out, float* lse, const float* partial_out,                \
        const float* partial_lse, int batch, int num_heads, int seq_len_q, int query_tiles,           \
        int tile_rows, int splits, const int* block_split_kvs, int64_t out_stride_batch,              \
        int64_t out_stride_token, int64_t out_stride_head, float output_scale, float lse_factor) {    \
        const int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;                      \
        __nv_bfloat16* to = out + blockIdx.y * out_stride_batch + token * out_stride_token +          \
                            head * out_stride_head;                                                   \
        combine<BANDS>(seq_lens, to, lse, partial_out, partial_lse, num_heads * seq_len_q,            \
                       query_tiles, tile_rows, splits, block_split_kvs, output_scale, lse_factor);    \
    }

template <int BANDS>
__device__ void combine(const int* seq_lens, __nv_bfloat16* to, float* lse, const float* partial_out,
                        const float* partial_lse, int rows, int query_tiles, int tile_rows, int splits,
                        const int* block_split_kvs, float output_scale, float lse_factor) {
    constexpr int kEach = 4 / BANDS;  // columns of a thread
    const int position = blockIdx.x, request = blockIdx.y;
    const int column = (blockIdx.z * blockDim.x + threadIdx.x) * kEach;
    const Runs runs(seq_lens[request], splits, block_split_kvs, request);
    if (runs.count <= 1) return;
    const int slot = (request * query_tiles + position / tile_rows) * splits;
    const int64_t first = int64_t(slot) * tile_rows + position % tile_rows;
    float top = -INFINITY, total = 0, o[kEach] = {};
    for (int s = 0; s < runs.count; ++s) top = fmaxf(top, partial_lse[first + s * tile_rows]);
    if (top == -INFINITY) top = 0;
    for (int s = 0; s < runs.count; ++s) {
        const int64_t part = first + s * tile_rows;
        const float weight = exp2f(partial_lse[part] - top);
        if (weight == 0) continue;
        total += weight;
        for (int i = 0; i < kEach; ++i) o[i] += weight * partial_out[part * 512 + column + i];
    }
    const float factor = total > 0 ? output_scale / total : 0;
    for (int i = 0; i < kEach; ++i) to[column + i] = __float2bfloat16(o[i] * factor);
    if (lse && column == 0)
        lse[int64_t(request) * rows + position] = (log2_or_minus_infinity(total) + top) * lse_factor;
}

COMBINE(stand_in_combine, 1)
COMBINE(stand_in_combine_bands2, 2)
