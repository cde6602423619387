// Messages of the attach socket (docs/formats/attach.md): SOCK_SEQPACKET at the
// gRPC socket's path + ".attach". One connection is one session's life line: when
// it closes, the session is over.
#ifndef SHARDD_PROTO_CONTRACT_ATTACH_H_
#define SHARDD_PROTO_CONTRACT_ATTACH_H_

#include <cstdint>
#include <string>

namespace shardd::contract {

inline constexpr uint32_t kAttachMagic = 0x61647368;  // "shda"
inline constexpr const char kAttachSuffix[] = ".attach";
inline constexpr size_t kTokenBytes = 16;

enum class AttachKind : uint16_t {
  kHello = 1,     // client: first message. daemon: token.
  kSegments = 2,  // client, after Open: one fd, its ring. daemon: two fds, the
                  // weights segment and the window, both O_RDONLY.
  kDoorbell = 3,  // client: look at my ring. No answer.
  kError = 4,     // daemon: text says why; the connection is then closed.
};

// Every message is exactly one of these.
struct AttachMessage {
  uint32_t magic = kAttachMagic;
  uint16_t version = 1;
  uint16_t kind = 0;  // AttachKind
  uint32_t protocol_version = 0;
  uint32_t reserved = 0;
  uint8_t token[kTokenBytes] = {};
  uint64_t session = 0;  // nonce, daemon's kHello
  char text[216] = {};   // kHello from the daemon: its version; kError: why
};
static_assert(sizeof(AttachMessage) == 256);

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_ATTACH_H_
