// Pages from where they are staged to host memory, by number; each has `num_words` words.
extern "C" __global__ void copy_pages(int num_pages, int num_words, const int* __restrict__ pages,
                                      const uint4* __restrict__ from, uint4* __restrict__ to) {
  for (int i = blockIdx.x; i < num_pages; i += gridDim.x) {
    const i64 first = i64(pages[i]) * num_words;
    for (int word = threadIdx.x; word < num_words; word += blockDim.x) {
      to[first + word] = from[first + word];
    }
  }
}
