// The slot-tree reduction over a lane type; included inside each CPU namespace,
// as adamw-inl.h is. Needs kernels/reduce_plan.h, <cstring>, <limits> and <type_traits>.
//
// A tile of every input is folded before the next tile is begun, so that partial
// sums stay in the L1 cache.

// How far ahead inputs are asked for: with many of them the hardware's prefetchers
// lose track.
inline constexpr size_t kPrefetchElements = kTileElements;

// The sum of a scratch row or an input of a type, and another.
enum class RowKind { kFloat32, kBFloat16, kFloat16, kScratch };

inline RowKind KindOf(DType dtype) {
  return dtype == DType::kFloat32    ? RowKind::kFloat32
         : dtype == DType::kBFloat16 ? RowKind::kBFloat16
                                     : RowKind::kFloat16;
}

struct Row {
  RowKind kind;
  const void* data;
};

template <class Lane, RowKind kKind>
SHARDD_LANE_FUNCTION typename Lane::V LoadRow(const void* data, size_t i) {
  if constexpr (kKind == RowKind::kScratch) {
    return Lane::LoadRaw(static_cast<const float*>(data) + i);  // flushed when it was made
  }
  constexpr size_t kSize = kKind == RowKind::kFloat32 ? 4 : 2;
  Lane::PrefetchRead(static_cast<const char*>(data) + (i + kPrefetchElements) * kSize);
  if constexpr (kKind == RowKind::kFloat32) {
    return Lane::template LoadAs<DType::kFloat32>(data, i);
  } else if constexpr (kKind == RowKind::kBFloat16) {
    return Lane::template LoadAs<DType::kBFloat16>(data, i);
  } else {
    return Lane::template LoadAs<DType::kFloat16>(data, i);
  }
}

// The full tree over kLeaves rows of one kind.
template <class Lane, RowKind kKind, uint32_t kLeaves>
struct FullTree {
  const void* data[kLeaves];

  template <uint32_t kFirst, uint32_t kCount>
  SHARDD_LANE_FUNCTION typename Lane::V Node(size_t i) const {
    if constexpr (kCount == 1) {
      return LoadRow<Lane, kKind>(data[kFirst], i);
    } else {
      return Lane::Add(Node<kFirst, kCount / 2>(i), Node<kFirst + kCount / 2, kCount / 2>(i));
    }
  }
  SHARDD_LANE_FUNCTION typename Lane::V Get(size_t i) const { return Node<0, kLeaves>(i); }
};

template <class Lane, RowKind kLeft, RowKind kRight>
struct SumOfRows {
  const void* left;
  const void* right;
  SHARDD_LANE_FUNCTION typename Lane::V Get(size_t i) const {
    return Lane::Add(LoadRow<Lane, kLeft>(left, i), LoadRow<Lane, kRight>(right, i));
  }
};

template <class Lane, RowKind kKind>
struct OneRow {
  const void* data;
  SHARDD_LANE_FUNCTION typename Lane::V Get(size_t i) const {
    return LoadRow<Lane, kKind>(data, i);
  }
};

// Sinks: what becomes of each value. The first writes a partial sum of the tile.
template <class Lane>
struct ScratchSink {
  float* out;
  template <class Source>
  void Consume(const Source& source, size_t n) const {
    for (size_t i = 0; i < n; i += Lane::kWidth) Lane::Store(source.Get(i), out + i);
  }
};

// Writes a node of the tree that leaves the kernel.
template <class Lane>
struct NodeSink {
  float* out;
  template <class Source>
  void Consume(const Source& source, size_t n) const {
    for (size_t i = 0; i < n; i += Lane::kWidth) {
      Lane::template StoreInOrder<false>(Lane::Canonical(source.Get(i)), out + i);
    }
  }
};

// Writes the final sum and accumulates the statistics of its block.
template <class Lane, DType kOut, bool kStream>
struct RootSink {
  void* out;
  typename Lane::BlockSums* sums;

  template <class Source>
  void Consume(const Source& source, size_t n) const {
    typename Lane::BlockSums local = *sums;  // in registers for the tile
    for (size_t i = 0; i < n; i += 32) Consume32<0>(source, i, &local);
    *sums = local;
  }

  // Elements i + kLane .. i + 31, unrolled: lane numbers are compile-time constants.
  template <size_t kLane, class Source>
  SHARDD_LANE_FUNCTION void Consume32(const Source& source, size_t i,
                                      typename Lane::BlockSums* local) const {
    const auto x = Lane::Canonical(source.Get(i + kLane));
    if constexpr (kOut == DType::kFloat32) {
      Lane::template StoreInOrder<kStream>(x, static_cast<float*>(out) + i + kLane);
    } else {
      Lane::template StoreNearest<kOut>(x, out, i + kLane);  // exact: a copy of a leaf
    }
    local->template Add<kLane>(x);
    if constexpr (kLane + Lane::kWidth < 32) {
      Consume32<kLane + Lane::kWidth>(source, i, local);
    }
  }
};

template <class Lane, RowKind kLeft, class Sink>
void AddToLeft(const Row& left, const Row& right, size_t n, const Sink& sink) {
  switch (right.kind) {
    case RowKind::kFloat32:
      return sink.Consume(SumOfRows<Lane, kLeft, RowKind::kFloat32>{left.data, right.data}, n);
    case RowKind::kBFloat16:
      return sink.Consume(SumOfRows<Lane, kLeft, RowKind::kBFloat16>{left.data, right.data}, n);
    case RowKind::kFloat16:
      return sink.Consume(SumOfRows<Lane, kLeft, RowKind::kFloat16>{left.data, right.data}, n);
    case RowKind::kScratch:
      return sink.Consume(SumOfRows<Lane, kLeft, RowKind::kScratch>{left.data, right.data}, n);
  }
}

// Sends left + right, n elements (a multiple of Lane::kWidth), to the sink.
template <class Lane, class Sink>
void AddRows(const Row& left, const Row& right, size_t n, const Sink& sink) {
  switch (left.kind) {
    case RowKind::kFloat32:
      return AddToLeft<Lane, RowKind::kFloat32>(left, right, n, sink);
    case RowKind::kBFloat16:
      return AddToLeft<Lane, RowKind::kBFloat16>(left, right, n, sink);
    case RowKind::kFloat16:
      return AddToLeft<Lane, RowKind::kFloat16>(left, right, n, sink);
    case RowKind::kScratch:
      return AddToLeft<Lane, RowKind::kScratch>(left, right, n, sink);
  }
}

template <class Lane, bool kStream>
class Reduction {
 public:
  using BlockSums = typename Lane::BlockSums;

  Reduction(const ReducePlan& plan, std::span<const ReduceInput> inputs, DType out_dtype,
            ReduceWorkspace* workspace)
      : plan_(plan),
        inputs_(inputs),
        out_dtype_(out_dtype),
        workspace_(workspace),
        scratch_(workspace->scratch()) {}

  // Folds elements first .. first + n - 1 of the inputs (n at most a block) into
  // out[0 .. n - 1].
  BlockStats Block(size_t first, size_t n, void* out) {
    BlockSums sums = {};
    const size_t whole = n / 32 * 32;
    for (size_t i = 0; i < whole; i += kTileElements) {
      const size_t tile = whole - i < kTileElements ? whole - i : kTileElements;
      Tile<kStream>(inputs_, first + i, tile, static_cast<char*>(out) + i * DTypeSize(out_dtype_),
                    &sums);
    }
    if (whole < n) {
      PaddedTile(first + whole, n - whole, static_cast<char*>(out) + whole * DTypeSize(out_dtype_),
                 &sums);
    }
    double lanes[32];
    sums.CopyLanes(lanes);
    BlockStats stats;
    stats.sum_squares = FoldTree(lanes);
    // The sign and payload of a NaN that arithmetic made differ between targets.
    if (stats.sum_squares != stats.sum_squares) {
      stats.sum_squares = std::numeric_limits<double>::quiet_NaN();
    }
    stats.nonfinite = sums.Largest() >= kExponentMask ? 1 : 0;
    return stats;
  }

 private:
  Row Find(std::span<const ReduceInput> inputs, ReduceOperand operand, size_t first) const {
    if (operand.scratch) return {RowKind::kScratch, scratch_ + operand.index * kTileElements};
    const ReduceInput& input = inputs[operand.index];
    return {KindOf(input.dtype),
            static_cast<const char*>(input.data) + first * DTypeSize(input.dtype)};
  }

  template <bool kStreamTile>
  void Tile(std::span<const ReduceInput> inputs, size_t first, size_t n, void* out,
            BlockSums* sums) {
    if (plan_.additions.empty()) {
      return CopyTile<kStreamTile>(Find(inputs, {.scratch = false, .index = 0}, first), n, out,
                                   sums);
    }
    for (size_t k = 0; k + 1 < plan_.additions.size(); ++k) {
      const ReduceAddition& addition = plan_.additions[k];
      Perform(addition, inputs, first, n,
              ScratchSink<Lane>{scratch_ + addition.target * kTileElements});
    }
    Perform(plan_.additions.back(), inputs, first, n,
            RootSink<Lane, DType::kFloat32, kStreamTile>{out, sums});
  }

  template <class Sink>
  void Perform(const ReduceAddition& addition, std::span<const ReduceInput> inputs, size_t first,
               size_t n, const Sink& sink) const {
    const Row left = Find(inputs, addition.left, first);
    if (addition.leaves == 0) {
      return AddRows<Lane>(left, Find(inputs, addition.right, first), n, sink);
    }
    const auto leaves = inputs.subspan(addition.left.index, addition.leaves);
    switch (left.kind) {
      case RowKind::kBFloat16:
        return AddLeaves<RowKind::kBFloat16>(leaves, first, n, sink);
      case RowKind::kFloat16:
        return AddLeaves<RowKind::kFloat16>(leaves, first, n, sink);
      case RowKind::kFloat32:
      case RowKind::kScratch:
        return AddLeaves<RowKind::kFloat32>(leaves, first, n, sink);
    }
  }

  template <RowKind kKind, class Sink>
  void AddLeaves(std::span<const ReduceInput> leaves, size_t first, size_t n,
                 const Sink& sink) const {
    if (leaves.size() == 4) return AddFullTree<kKind, 4>(leaves, first, n, sink);
    AddFullTree<kKind, 8>(leaves, first, n, sink);
  }

  template <RowKind kKind, uint32_t kLeaves, class Sink>
  void AddFullTree(std::span<const ReduceInput> leaves, size_t first, size_t n,
                   const Sink& sink) const {
    FullTree<Lane, kKind, kLeaves> tree;
    for (uint32_t k = 0; k < kLeaves; ++k) {
      tree.data[k] = static_cast<const char*>(leaves[k].data) + first * DTypeSize(leaves[k].dtype);
    }
    sink.Consume(tree, n);
  }

  template <bool kStreamTile>
  void CopyTile(const Row& row, size_t n, void* out, BlockSums* sums) {
    const RootSink<Lane, DType::kFloat32, kStreamTile> to_fp32{out, sums};
    const bool widen = out_dtype_ == DType::kFloat32;
    switch (row.kind) {
      case RowKind::kBFloat16:
        if (widen) return to_fp32.Consume(OneRow<Lane, RowKind::kBFloat16>{row.data}, n);
        return RootSink<Lane, DType::kBFloat16, false>{out, sums}.Consume(
            OneRow<Lane, RowKind::kBFloat16>{row.data}, n);
      case RowKind::kFloat16:
        if (widen) return to_fp32.Consume(OneRow<Lane, RowKind::kFloat16>{row.data}, n);
        return RootSink<Lane, DType::kFloat16, false>{out, sums}.Consume(
            OneRow<Lane, RowKind::kFloat16>{row.data}, n);
      case RowKind::kFloat32:
      case RowKind::kScratch:
        return to_fp32.Consume(OneRow<Lane, RowKind::kFloat32>{row.data}, n);
    }
  }

  // A tile of n < 32 elements, by way of zero-padded copies: nothing beyond the
  // inputs is read, and zeros change no statistic.
  void PaddedTile(size_t first, size_t n, void* out, BlockSums* sums) {
    for (size_t k = 0; k < inputs_.size(); ++k) {
      ReduceWorkspace::PaddedRow& row = workspace_->padded_rows()[k];
      row = {};
      const size_t size = DTypeSize(inputs_[k].dtype);
      std::memcpy(row.values, static_cast<const char*>(inputs_[k].data) + first * size, n * size);
    }
    ReduceWorkspace::PaddedRow padded_out;
    Tile<false>(workspace_->padded_inputs(), 0, 32, padded_out.values, sums);
    std::memcpy(out, padded_out.values, n * DTypeSize(out_dtype_));
  }

  const ReducePlan& plan_;
  std::span<const ReduceInput> inputs_;
  DType out_dtype_;
  ReduceWorkspace* workspace_;
  float* scratch_;
};

// Owns nothing and allocates nothing: see Reducer.
template <class Lane, bool kStream>
void ReduceBlocks(const ReducePlan& plan, std::span<const ReduceInput> inputs, size_t count,
                  void* out, DType out_dtype, BlockStats* stats, ReduceWorkspace* workspace) {
  Reduction<Lane, kStream> reduction(plan, inputs, out_dtype, workspace);
  static_assert(std::is_trivially_destructible_v<decltype(reduction)>);
  for (size_t i = 0; i < count; i += kBlockElements) {
    const size_t n = count - i < kBlockElements ? count - i : kBlockElements;
    const BlockStats block =
        reduction.Block(i, n, static_cast<char*>(out) + i * DTypeSize(out_dtype));
    if (stats != nullptr) stats[i / kBlockElements] = block;
  }
}

// a + b into out, which may be either: plain stores, each lane read before it is
// written.
template <class Lane>
void AddLoop(const ReduceInput& a, const ReduceInput& b, size_t count, float* out) {
  const Row left{KindOf(a.dtype), a.data}, right{KindOf(b.dtype), b.data};
  const size_t whole = count / Lane::kWidth * Lane::kWidth;
  AddRows<Lane>(left, right, whole, NodeSink<Lane>{out});
  const size_t rest = count - whole;
  if (rest == 0) return;
  alignas(64) float padded_a[Lane::kWidth] = {}, padded_b[Lane::kWidth] = {};
  alignas(64) float sum[Lane::kWidth];
  const size_t a_size = DTypeSize(a.dtype), b_size = DTypeSize(b.dtype);
  std::memcpy(padded_a, static_cast<const char*>(a.data) + whole * a_size, rest * a_size);
  std::memcpy(padded_b, static_cast<const char*>(b.data) + whole * b_size, rest * b_size);
  AddRows<Lane>({left.kind, padded_a}, {right.kind, padded_b}, Lane::kWidth, NodeSink<Lane>{sum});
  std::memcpy(out + whole, sum, rest * sizeof(float));
}
