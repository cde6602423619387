// A TCP proxy on loopback that a test can cut, mend and point elsewhere: the network between
// two daemons.
#ifndef SHARDD_TESTS_SUPPORT_TCP_PROXY_H_
#define SHARDD_TESTS_SUPPORT_TCP_PROXY_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <string>
#include <thread>

#include "proto/contract/fd_passing.h"

namespace shardd::test {

// Thread-safe. One thread of its own.
class TcpProxy {
 public:
  TcpProxy();
  ~TcpProxy();
  TcpProxy(const TcpProxy&) = delete;

  uint16_t port() const { return port_; }
  // Where new connections lead; 0: nowhere (they are closed).
  void SetTarget(uint16_t port) { target_ = port; }
  // Nothing passes and nobody is told: what a lost network looks like.
  void Cut() { Set(true); }
  void Mend() { Set(false); }
  // Ends all connections that there are.
  void BreakConnections();

 private:
  struct Half {
    contract::UniqueFd fd;
    std::string pending;  // to be written to fd
    bool ended = false;   // nothing more comes from fd
  };
  struct Pair {
    Half a, b;
  };
  void Set(bool cut);
  void Ring();
  void Main();
  void Accept();
  static bool Pass(Half* from, Half* to, short events);

  contract::UniqueFd listener_, event_;
  uint16_t port_ = 0;
  std::atomic<uint16_t> target_{0};
  std::atomic<bool> cut_{false}, break_{false}, stop_{false};
  std::list<Pair> pairs_;
  std::thread thread_;
};

}  // namespace shardd::test

#endif  // SHARDD_TESTS_SUPPORT_TCP_PROXY_H_
