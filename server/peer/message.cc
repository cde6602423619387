#include "server/peer/message.h"

#include <grpcpp/support/slice.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"

namespace shardd::peer {

namespace {

using SharedBytes = std::shared_ptr<const std::string>;

void Drop(void* shared) { delete static_cast<SharedBytes*>(shared); }

}  // namespace

grpc::ByteBuffer EncodeFrame(const v1::PeerFrame& frame, SharedBytes bytes) {
  const std::string header = frame.SerializeAsString();
  const auto length = static_cast<uint32_t>(header.size());
  std::string head(sizeof(length), '\0');
  std::memcpy(head.data(), &length, sizeof(length));
  head += header;
  std::vector<grpc::Slice> slices = {grpc::Slice(head)};
  if (bytes != nullptr && !bytes->empty()) {
    auto* kept = new SharedBytes(std::move(bytes));
    slices.emplace_back(const_cast<char*>((*kept)->data()), (*kept)->size(), &Drop, kept);
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::StatusOr<DecodedFrame> DecodeFrame(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) return absl::InvalidArgumentError("a frame cannot be read");
  std::string all;
  all.reserve(buffer.Length());
  for (const grpc::Slice& slice : slices) {
    all.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  uint32_t length = 0;
  if (all.size() < sizeof(length)) return absl::InvalidArgumentError("a frame is too short");
  std::memcpy(&length, all.data(), sizeof(length));
  const size_t rest = all.size() - sizeof(length);
  DecodedFrame decoded;
  if (length > rest || rest - length > kMaxPieceBytes ||
      !decoded.frame.ParseFromArray(all.data() + sizeof(length), static_cast<int>(length))) {
    return absl::InvalidArgumentError(absl::StrCat("a frame of ", all.size(),
                                                   " bytes with a header of ", length,
                                                   " is not one of this protocol"));
  }
  decoded.bytes.assign(all, sizeof(length) + length, rest - length);
  return decoded;
}

}  // namespace shardd::peer
