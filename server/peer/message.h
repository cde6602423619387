// What daemons tell each other, and how it lies on the wire (docs/formats/peer.md).
#ifndef SHARDD_SERVER_PEER_MESSAGE_H_
#define SHARDD_SERVER_PEER_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "proto/peer.pb.h"

namespace shardd::peer {

inline constexpr uint32_t kPeerProtocolVersion = 1;
// Raw bytes of one message.
inline constexpr size_t kMaxPieceBytes = 1 << 20;
// A frame as a whole: a piece, or a decision with its table and blob.
inline constexpr int kMaxFrameBytes = 512 << 20;
inline constexpr char kLinkMethod[] = "/shardd.v1.Peer/Link";

struct Message {
  v1::PeerMessage header;
  std::string bytes;  // bulk
};

// The frame; `bytes` is shared, not copied, and may be null.
grpc::ByteBuffer EncodeFrame(const v1::PeerFrame& frame, std::shared_ptr<const std::string> bytes);

struct DecodedFrame {
  v1::PeerFrame frame;
  std::string bytes;
};
// InvalidArgument: not a frame, or more raw bytes than one may carry.
absl::StatusOr<DecodedFrame> DecodeFrame(const grpc::ByteBuffer& buffer);

}  // namespace shardd::peer

#endif  // SHARDD_SERVER_PEER_MESSAGE_H_
