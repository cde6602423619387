// CRC32C (Castagnoli) over ISA-L.
#ifndef SHARDD_PROTO_CONTRACT_CRC32C_H_
#define SHARDD_PROTO_CONTRACT_CRC32C_H_

#include <isa-l/crc.h>

#include <cstddef>
#include <cstdint>

namespace shardd::contract {

// The checksum of `bytes` at `data`, continuing `crc` (0 to begin).
inline uint32_t Crc32c(const void* data, size_t bytes, uint32_t crc = 0) {
  // ISA-L takes a mutable pointer and an int length, writes nothing, and leaves the
  // inversions to its caller.
  auto* at = static_cast<unsigned char*>(const_cast<void*>(data));
  crc = ~crc;
  while (bytes > 0) {
    const size_t part = bytes < (size_t{1} << 30) ? bytes : size_t{1} << 30;
    crc = crc32_iscsi(at, static_cast<int>(part), crc);
    at += part;
    bytes -= part;
  }
  return ~crc;
}

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_CRC32C_H_
