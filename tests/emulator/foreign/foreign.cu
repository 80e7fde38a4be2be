// Ordinary CUDA C++, none of it written for the emulator: tests run its PTX and compare with numpy.
// The PTX beside this file was made by nvcc 13.0:
//     nvcc -ptx -arch=sm_90 -o foreign_sm90.ptx foreign.cu
//     nvcc -ptx -arch=sm_100a -o foreign_sm100a.ptx foreign.cu

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Sum of squares: shuffles, one warp that finishes, one atomic for each block.
extern "C" __global__ void block_sum(const float* x, int n, float* total) {
    __shared__ float partial[32];
    float sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        sum += x[i] * x[i];
    for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
        for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
        if (threadIdx.x == 0) atomicAdd(total, sum);
    }
}

// Shared and global atomics with conflicts inside a warp.
extern "C" __global__ void histogram(const unsigned char* x, int n, unsigned* bins) {
    __shared__ unsigned local[256];
    #pragma unroll 1
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[x[i]], 1);
    __syncthreads();
    #pragma unroll 1
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (local[i]) atomicAdd(&bins[i], local[i]);
}

extern "C" __global__ void transpose(const float* in, float* out, int width, int height) {
    __shared__ float tile[32][33];
    int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
    #pragma unroll 1
    for (int j = 0; j < 32; j += blockDim.y)
        if (x < width && y + j < height)
            tile[threadIdx.y + j][threadIdx.x] = in[(y + j) * width + x];
    __syncthreads();
    x = blockIdx.y * 32 + threadIdx.x, y = blockIdx.x * 32 + threadIdx.y;
    #pragma unroll 1
    for (int j = 0; j < 32; j += blockDim.y)
        if (x < height && y + j < width)
            out[(y + j) * height + x] = tile[threadIdx.x][threadIdx.y + j];
}

// Every thread loops its own number of times and may leave early.
extern "C" __global__ void collatz(const unsigned* start, unsigned* steps, int n, unsigned limit) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long v = start[i];
    unsigned count = 0;
    while (v != 1) {
        if (count == limit) {
            count = ~0u;
            break;
        }
        ++count;
        if (v & 1) {
            v = 3 * v + 1;
            continue;
        }
        v >>= 1;
    }
    steps[i] = count;
}

extern "C" __global__ void dispatch(const int* op, const int* a, const int* b, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int x = a[i], y = b[i], r;
    switch (op[i]) {
        case 0: r = x + y; break;
        case 1: r = x - y; break;
        case 2: r = x * y; break;
        case 3: r = x / y; break;
        case 4: r = x % y; break;
        case 5: r = min(x, y); break;
        case 6: r = x << (y & 31); break;
        case 7: r = __clz(x) * 100 + __popc(y); break;
        case 8: r = __brev(x) ^ __byte_perm(x, y, 0x5140); break;
        case 9: r = __funnelshift_r(x, y, 7); break;
        case 10: r = __mulhi(x, y) + __usad(x, y, 3); break;
        case 11: r = (x ^ y) + (x & ~y); break;
        default: r = abs(x);
    }
    out[i] = r;
}

// Insertion sort in an array that has to live in local memory.
extern "C" __global__ void sort16(int* rows, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v[16];
    #pragma unroll 1
    for (int k = 0; k < 16; ++k) v[k] = rows[16 * i + k];
    #pragma unroll 1
    for (int k = 1; k < 16; ++k) {
        int key = v[k], j = k;
        while (j && v[j - 1] > key) {
            v[j] = v[j - 1];
            --j;
        }
        v[j] = key;
    }
    #pragma unroll 1
    for (int k = 0; k < 16; ++k) rows[16 * i + k] = v[k];
}

// Packed and scalar half precision, both kinds.
extern "C" __global__ void halves(const __half2* a, const __half2* b, __half2* out,
                                  const __nv_bfloat162* c, __nv_bfloat162* out16, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __half2 p = __hfma2(a[i], b[i], __hneg2(a[i]));
    p = __hmax2(p, __hmul2(a[i], __float2half2_rn(0.5f)));
    if (__low2float(p) < __high2float(p)) p = __lowhigh2highlow(p);
    out[i] = __hadd2(p, __hsub2(b[i], a[i]));
    __nv_bfloat162 q = __hfma2(c[i], c[i], __floats2bfloat162_rn(1.f, -1.f));
    out16[i] = __hmin2(__habs2(q), __float2bfloat162_rn(3.f));
}

// Votes, matches, scans and warp reductions; lanes past n take part with zero.
extern "C" __global__ void warp_tools(const int* x, int* scan, unsigned* votes, unsigned* matches,
                                      int* sums, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int lane = threadIdx.x % 32, v = i < n ? x[i] : 0, s = v;
    for (int step = 1; step < 32; step <<= 1) {
        int up = __shfl_up_sync(~0u, s, step);
        if (lane >= step) s += up;
    }
    unsigned vote = __ballot_sync(~0u, v > 3);
    vote += __any_sync(~0u, v == 5) + 2 * __all_sync(~0u, v < 9);
    unsigned match = __match_any_sync(~0u, v);
    int sum = __reduce_add_sync(~0u, v) ^ __reduce_max_sync(~0u, v);
    sum ^= (int)__reduce_xor_sync(~0u, (unsigned)v);
    int wrap = __shfl_sync(~0u, v, lane + 3, 8);
    if (i >= n) return;
    scan[i] = s;
    votes[i] = vote;
    matches[i] = match;
    sums[i] = sum + wrap;
}

extern "C" __global__ void floats(const float* a, const float* b, float* out, const double* d,
                                  double* outd, int* ints, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = a[i], y = b[i];
    float r = sqrtf(fabsf(x)) / (fabsf(y) + 1) + fmaf(x, y, rintf(x));
    out[4 * i] = r - floorf(y) + ceilf(x) - truncf(y);
    out[4 * i + 1] = fminf(x, y) + copysignf(2, x) + (isnan(x) ? 7.f : 0.f);
    r = __fdividef(x, 3.f) + __expf(y * 0.1f);
    out[4 * i + 2] = r + __logf(fabsf(x) + 1) + rsqrtf(fabsf(y) + 1);
    r = __sinf(y * 0.5f) + exp2f(-fabsf(x) * 0.1f);
    out[4 * i + 3] = r + __cosf(y) + __powf(fabsf(x) + 1, 0.3f);
    outd[i] = sqrt(fabs(d[i])) / (d[i] * d[i] + 1) + fma(d[i], 3.0, 0.25);
    ints[4 * i] = (int)x;
    ints[4 * i + 1] = __float2int_rn(y);
    ints[4 * i + 2] = __float2uint_ru(fabsf(x));
    ints[4 * i + 3] = __float_as_int(x) ^ (int)(long long)(d[i] * 1e6);
}

// Division, remainder and multiplication of 64 bits.
__device__ unsigned long long gcd(unsigned long long a, unsigned long long b) {
    while (b) {
        unsigned long long t = a % b;
        a = b;
        b = t;
    }
    return a;
}
extern "C" __global__ void wide(const unsigned long long* a, const unsigned long long* b,
                                unsigned long long* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long x = a[i], y = b[i];
    out[i] = gcd(x, y) ^ __umul64hi(x, y) ^ (x / (y | 1)) ^ __clzll(x) ^ __popcll(y);
}

// Compare-and-swap loops and the other atomics.
extern "C" __global__ void atomics(double* sum, int* cells, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long* at = (unsigned long long*)sum;
    unsigned long long old = *(volatile unsigned long long*)at, assumed;
    do {
        assumed = old;
        old = atomicCAS(at, assumed, __double_as_longlong(__longlong_as_double(assumed) + x[i]));
    } while (old != assumed);
    atomicMax(&cells[0], x[i]);
    atomicMin(&cells[1], x[i]);
    atomicOr(&cells[2], 1 << (x[i] & 31));
    atomicXor(&cells[3], x[i]);
    atomicInc((unsigned*)&cells[4], 10);
    atomicSub(&cells[5], x[i]);
    atomicAnd(&cells[6], ~(1 << (i & 31)));
    atomicExch(&cells[7], 42);
    atomicAdd(sum + 1, 0.5);
}

// A ring in a cluster: each block adds what the next one wrote into its own shared memory.
extern "C" __global__ void __cluster_dims__(4, 1, 1) ring(const float* in, float* out) {
    __shared__ float mine[64];
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    int t = threadIdx.x;
    mine[t] = in[blockIdx.x * 64 + t];
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    unsigned at = (unsigned)__cvta_generic_to_shared(&mine[63 - t]), there;
    float v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"((rank + 1) % size));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
    out[blockIdx.x * 64 + t] = mine[t] + v;
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__constant__ float weights[4] = {0.5f, -1.f, 2.f, 0.25f};
__device__ unsigned launches = 5;
struct Pair {
    float x;
    short y;
    char z;
};
// Constant and global variables, a struct by value, vector types.
extern "C" __global__ void constants(Pair pair, const float4* in, float4* out, int n,
                                     unsigned* count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float4 v = in[i];
        v.x = v.x * weights[0] + pair.x;
        v.y *= weights[i & 3];
        out[i] = make_float4(v.x, v.y, v.z + pair.y, v.w - pair.z);
    }
    if (i == 0) *count = launches++;
}

// Asynchronous copies, double buffered, by cp.async groups.
extern "C" __global__ void pipeline(const float* in, float* out, int tiles) {
    __shared__ __align__(16) float buffer[2][128];
    auto fetch = [&](int tile) {
        if (threadIdx.x < 32) {
            unsigned to = (unsigned)__cvta_generic_to_shared(&buffer[tile & 1][threadIdx.x * 4]);
            const float* from = in + tile * 128 + threadIdx.x * 4;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
        }
        asm volatile("cp.async.commit_group;");
    };
    fetch(0);
    #pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        if (tile + 1 < tiles)
            fetch(tile + 1);
        else
            asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        out[tile * 128 + threadIdx.x] = buffer[tile & 1][127 - threadIdx.x] + tile;
        __syncthreads();
    }
}
