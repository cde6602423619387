// The project's version: of the daemon, the client library and the tools. An
// embedded daemon must have exactly its client's.
#ifndef SHARDD_PROTO_CONTRACT_VERSION_H_
#define SHARDD_PROTO_CONTRACT_VERSION_H_

namespace shardd::contract {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace shardd::contract

#endif  // SHARDD_PROTO_CONTRACT_VERSION_H_
