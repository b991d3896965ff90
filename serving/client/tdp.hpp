// A client of a thor-dflash plan server (TDP/1, docs/reference/protocol.md): C++17, one header.
// Needs cppzmq and nlohmann-json (Debian: libzmq3-dev cppzmq-dev nlohmann-json3-dev); link with -lzmq.
//
//   tdp::Client client("tcp://127.0.0.1:5571");
//   tdp::json result = client.plan({{"prompt", "Bring the cup."}, {"deadline_ms", 8000}});
//   if (tdp::whole(result)) execute(result["plan"]);
//
// Steps as they are decoded, and a cancel from another thread:
//
//   tdp::Plan plan(client, {{"prompt", "Bring the cup."}, {"stream", "steps"}});
//   while (auto event = plan.next()) ...   // chunks, then the result; elsewhere: plan.cancel()
//
// With what a camera shows:
//
//   tdp::json request = tdp::showing("Bring the cup.", {tdp::image("cam0", "rgb8", pixels, 640, 480)});
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>
#include <zmq.hpp>

namespace tdp {

using nlohmann::json;
using std::chrono::milliseconds;

// A request that was refused or failed. `code` is one of section 7 of the protocol, or "unreachable".
struct Error : std::runtime_error {
  Error(std::string code, const std::string& message, bool retryable = false)
      : std::runtime_error(code + ": " + message), code(std::move(code)), retryable(retryable) {}
  std::string code;
  bool retryable;        // the same request may succeed later
  json reply = nullptr;  // the server's whole message: field, min_ms, retry_after_ms; null if it sent none
};

struct Options {
  milliseconds timeout{5000};         // longest wait for a connection, and for a control operation
  milliseconds plan_timeout{120000};  // for a plan without a deadline, or the next piece of its stream
  int retries = 3;                    // how often a request is sent again: see Client
  std::string token;                  // the secret of a server with serve.token_file
  // CURVE keys, 40 characters each, as `thor-dflash keygen` writes them; all three or none.
  std::string server_key, public_key, secret_key;
  std::size_t max_message = 1 << 20;  // without images, as the server's limits.max_message: it closes on longer ones
};

// Whether a result is a plan to act on: complete, and valid under the request's schema.
inline bool whole(const json& result) {
  return result.value("status", "") == "ok" && result.value("plan_valid", false);
}

// An image of a request: a JPEG or PNG file ("jpeg", "png"), or raw pixels ("rgb8", "bgr8", "mono8") with their size;
// `step` is the bytes of a row, 0 for no padding. A request with `images` is sent as msgpack, where bytes need no base64.
inline json image(std::string id, std::string format, std::vector<std::uint8_t> data, unsigned width = 0,
                  unsigned height = 0, unsigned step = 0) {
  return {{"id", std::move(id)}, {"format", std::move(format)}, {"data", json::binary(std::move(data))},
          {"width", width}, {"height", height}, {"step", step}};
}

// The `messages` and `images` of a request: a text, and images that come after it.
inline json showing(std::string text, std::vector<json> images) {
  json parts = {{{"type", "text"}, {"text", std::move(text)}}};
  for (const json& each : images) parts.push_back({{"type", "image"}, {"image", each["id"]}});
  json request = {{"messages", {{{"role", "user"}, {"content", std::move(parts)}}}}};
  request["images"] = std::move(images);
  return request;
}

class Plan;

// Where a server is. Any thread may use it; each request has a connection of its own. It must outlive its plans.
//
// A request is sent again, on a new connection, after an error that is `retryable` (busy, unreachable, a fault of
// the engine): at most `retries` times, each after the server's retry_after_ms or 100 ms, and within its deadline or
// timeout. Waiting for a server that warms up (not_ready) uses none of them. Not sent again are `drain` and
// `shutdown`, a plan of which a piece has come, and a plan whose session has begun a later one: it would displace
// that. With retries 0 every error is thrown at once.
class Client {
 public:
  explicit Client(std::string endpoint, Options options = {})
      : endpoint_(std::move(endpoint)), options_(std::move(options)) {}

  // One plan; its result. Throws Error.
  inline json plan(json request);

  // A control operation by its message, such as {{"op", "hello"}}; its reply. Throws Error.
  inline json call(json request);

 private:
  friend class Plan;

  // Number the plans of a session; the plan with the highest number is its latest.
  std::uint64_t number(const std::string& session) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++latest_[session];
  }

  bool is_latest(const std::string& session, std::uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return latest_[session] == number;
  }

  zmq::context_t context_;
  std::mutex mutex_;
  std::map<std::string, std::uint64_t> latest_;  // of the sessions that plans have named
  const std::string endpoint_;
  const Options options_;
};

// A request under way. Its destructor cancels it if it is not over.
class Plan {
 public:
  // Waits for a connection, then sends. A `deadline_ms` begins here. Throws Error "unreachable", or "deadline".
  Plan(Client& client, json request)
      : client_(client), options_(client.options_), endpoint_(client.endpoint_), began_(Clock::now()),
        left_(client.options_.retries) {
    request.emplace("op", "plan");
    request.emplace("id", new_id());
    request["v"] = 1;
    if (!options_.token.empty()) request.emplace("token", options_.token);
    id_ = request["id"].get<std::string>();
    const bool plan = request["op"] == "plan";
    patience_ = plan || request["op"] == "prefix.put" ? options_.plan_timeout : options_.timeout;
    once_ = request["op"] == "drain" || request["op"] == "shutdown";
    if (request.contains("deadline_ms") && !request["deadline_ms"].is_null())
      due_ = began_ + milliseconds(request["deadline_ms"].get<std::int64_t>());
    const json session = request.value("session", json());
    if (plan && session.is_string() && request.value("preempt", json()) != "none") {
      session_ = session.get<std::string>();
      number_ = client_.number(session_);
    } else if (plan && session.is_null()) {
      request["session"] = id_;  // of its own, so that each try takes the place of the one before
    }
    body_of(request);  // what cannot be sent needs no connection
    request_ = std::move(request);
    piece_ = Clock::now();
    open();
  }

  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // The server cancels the plans of a connection that closes.
  ~Plan() = default;

  // The next chunk, then the result, then nothing. Throws Error.
  std::optional<json> next() {
    while (!over_) {
      try {
        if (auto reply = event()) return reply;
      } catch (const Error& error) {
        over_ = true;
        if (begun_) throw;
        wait_to_retry(error);
        over_ = false;
        open();
      }
    }
    return std::nullopt;
  }

  // End the plan: `next` then throws Error "cancelled", or returns a result that was there before.
  // The only method for other threads; it may come before the first `next`, and more than once.
  void cancel() noexcept {
    const std::uint64_t one = 1;
    while (::write(wake_.fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  // The id of the request: the `target` of a cancel by another client.
  const std::string& id() const { return id_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct EventFd {
    EventFd() : fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
      if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    EventFd(const EventFd&) = delete;
    ~EventFd() { ::close(fd); }
    const int fd;
  };

  static std::string new_id() {
    std::random_device random;
    std::string id;
    for (int i = 0; i < 32; ++i) id += "0123456789abcdef"[random() & 15];
    return id;
  }

  static milliseconds left(Clock::time_point until) {
    return std::chrono::ceil<milliseconds>(std::max(until - Clock::now(), Clock::duration::zero()));
  }

  // Connect and send, as often as there are tries.
  void open() {
    for (;;) {
      try {
        connect();
        wait_for_connection();
        if (due_) request_["deadline_ms"] = std::max<std::int64_t>(1, left(*due_).count());
        send(request_);
        piece_ = Clock::now();
        return;
      } catch (const Error& error) {
        wait_to_retry(error);
      }
    }
  }

  // Wait until the next try. Throws the error that is being handled if there is none.
  void wait_to_retry(const Error& error) {
    const json after = error.reply.is_object() ? error.reply.value("retry_after_ms", json()) : json();
    const milliseconds pause(after.is_number() ? std::int64_t(after.get<double>()) : 100);
    const auto until = due_ ? *due_ : piece_ + patience_;
    if (!error.retryable || left_ <= 0 || Clock::now() + pause >= until) throw;
    if (once_ && error.code == "unreachable") throw;
    if (!session_.empty() && !client_.is_latest(session_, number_))
      throw Error("preempted", "a later plan of its session was begun");
    if (error.code != "not_ready") --left_;
    zmq::pollitem_t cancelled = {nullptr, wake_.fd, ZMQ_POLLIN, 0};
    zmq::poll(&cancelled, 1, pause);
    if (cancelled.revents) throw Error("cancelled", "the plan was cancelled");
  }

  // The next reply to this request; nothing if something else happened meanwhile.
  std::optional<json> event() {
    auto reply = receive();
    if (!reply || reply->value("id", "") != id_) return std::nullopt;
    piece_ = Clock::now();
    const std::string type = reply->value("type", "");
    over_ = type != "chunk";
    if (type == "error") {
      Error error(reply->value("code", "internal"), reply->value("message", ""),
                  reply->value("retryable", false));
      error.reply = std::move(*reply);
      throw error;
    }
    begun_ = true;
    return reply;
  }

  void connect() {
    socket_ = zmq::socket_t(client_.context_, zmq::socket_type::dealer);
    monitor_ = zmq::socket_t(client_.context_, zmq::socket_type::pair);
    connected_ = lost_ = refused_ = false;
    socket_.set(zmq::sockopt::linger, 0);  // a robot that stops must not wait for its socket
    monitor_.set(zmq::sockopt::linger, 0);
    socket_.set(zmq::sockopt::immediate, 1);  // nothing is queued before there is a connection
    socket_.set(zmq::sockopt::rcvhwm, 1024);
    socket_.set(zmq::sockopt::tcp_keepalive, 1);  // no heartbeats: protocol.md, section 9
    socket_.set(zmq::sockopt::tcp_keepalive_idle, 1);
    socket_.set(zmq::sockopt::tcp_keepalive_intvl, 1);
    socket_.set(zmq::sockopt::tcp_keepalive_cnt, 4);
    socket_.set(zmq::sockopt::tcp_maxrt, 30000);
    socket_.set(zmq::sockopt::ipv6, endpoint_.find('[') != std::string::npos);
    if (!options_.server_key.empty()) {
      socket_.set(zmq::sockopt::curve_serverkey, options_.server_key);
      socket_.set(zmq::sockopt::curve_publickey, options_.public_key);
      socket_.set(zmq::sockopt::curve_secretkey, options_.secret_key);
    }
    const std::string events = "inproc://tdp-" + id_ + "-" + new_id();
    if (zmq_socket_monitor(socket_.handle(), events.c_str(), LOST | ZMQ_EVENT_HANDSHAKE_SUCCEEDED) != 0)
      throw zmq::error_t();
    monitor_.connect(events);
    socket_.connect(endpoint_);
  }

  void wait_for_connection() {
    auto until = Clock::now() + options_.timeout;
    if (due_) until = std::min(until, *due_);
    for (;;) {
      zmq::pollitem_t items[] = {{socket_.handle(), 0, ZMQ_POLLOUT, 0},
                                 {monitor_.handle(), 0, ZMQ_POLLIN, 0},
                                 {nullptr, wake_.fd, ZMQ_POLLIN, 0}};
      zmq::poll(items, 3, left(until));
      drain_events();
      if (items[0].revents & ZMQ_POLLOUT) return;
      if (items[2].revents) throw Error("cancelled", "the plan was cancelled");
      if (refused_) throw unreachable("it refused the connection: other keys?");
      if (due_ && Clock::now() >= *due_)
        throw Error("deadline", "the deadline passed before there was a connection to " + endpoint_);
      if (Clock::now() >= until) throw unreachable("no connection could be made");
    }
  }

  std::string body_of(const json& message) const {
    std::string body;
    if (message.contains("images")) json::to_msgpack(message, body);
    else body = message.dump();
    std::size_t images = 0;
    if (message.contains("images"))
      for (const json& one : message["images"])
        if (one.contains("data") && one["data"].is_binary()) images += one["data"].get_binary().size();
    check_size("a request without its images", body.size() - images, options_.max_message);
    check_size("the images of a request", images, std::size_t{16} << 20);
    return body;
  }

  static void check_size(const std::string& what, std::size_t size, std::size_t most) {
    if (size > most)
      throw Error("too_large", what + " must be <= " + std::to_string(most) + " bytes (got " + std::to_string(size) + ")");
  }

  void send(const json& message) {
    const std::string body = body_of(message);
    // Without an empty frame, which IMMEDIATE forbids (protocol.md, section 9); nor has the reply one.
    if (!socket_.send(zmq::buffer(body), zmq::send_flags::dontwait))
      throw unreachable("the connection was lost");
  }

  // One reply; nothing if something else happened meanwhile.
  std::optional<json> receive() {
    const auto until = due_ ? *due_ + GRACE : piece_ + patience_;
    zmq::pollitem_t items[] = {{socket_.handle(), 0, ZMQ_POLLIN, 0},
                               {monitor_.handle(), 0, ZMQ_POLLIN, 0},
                               {nullptr, wake_.fd, ZMQ_POLLIN, 0}};
    zmq::poll(items, 3, left(until));
    drain_events();  // before reading: all that came before a loss can then be read
    zmq::message_t body;
    if (socket_.recv(body, zmq::recv_flags::dontwait)) return parse(body);
    if (lost_) throw unreachable("the connection was lost");
    if (items[2].revents) send_cancel();
    if (Clock::now() >= until) throw unreachable("no answer in time");
    return std::nullopt;
  }

  static json parse(const zmq::message_t& body) {
    const char* begin = static_cast<const char*>(body.data());
    const char* end = begin + body.size();
    json reply = begin != end && *begin == '{' ? json::parse(begin, end, nullptr, false)
                                               : json::from_msgpack(begin, end, true, false);
    if (!reply.is_object()) throw Error("internal", "the reply must be an object");
    return reply;
  }

  void send_cancel() {
    std::uint64_t count;
    if (::read(wake_.fd, &count, sizeof count) < 0) return;
    json message = {{"v", 1}, {"op", "cancel"}, {"id", new_id()}, {"target", id_}};
    if (!options_.token.empty()) message["token"] = options_.token;
    send(message);  // its acknowledgement has another id, and is skipped
  }

  void drain_events() {
    zmq::message_t event, address;
    while (monitor_.recv(event, zmq::recv_flags::dontwait)) {
      (void)monitor_.recv(address, zmq::recv_flags::none);
      std::uint16_t number = 0;
      std::memcpy(&number, event.data(), sizeof number);
      if (number == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) connected_ = true;
      if (number & REFUSED) refused_ = true;
      if (number == ZMQ_EVENT_DISCONNECTED && connected_) lost_ = true;
    }
  }

  Error unreachable(const char* why) const {
    return Error("unreachable", endpoint_ + " must answer (got none: " + why + ")", !refused_);
  }

  static constexpr int REFUSED =
      ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
  static constexpr int LOST = REFUSED | ZMQ_EVENT_DISCONNECTED;
  static constexpr milliseconds GRACE{2000};  // beyond a deadline: the answer may be on its way

  Client& client_;
  const Options options_;
  const std::string endpoint_;
  const Clock::time_point began_;
  const EventFd wake_;
  zmq::socket_t socket_, monitor_;
  json request_;
  std::string id_, session_;  // the latter: that this plan may displace plans of
  std::uint64_t number_ = 0;
  int left_;
  std::optional<Clock::time_point> due_;
  Clock::time_point piece_;  // when the last piece came
  milliseconds patience_{0};
  bool connected_ = false, lost_ = false, refused_ = false, begun_ = false, over_ = false, once_ = false;
};

inline json Client::plan(json request) {
  request["stream"] = false;
  return *Plan(*this, std::move(request)).next();
}

inline json Client::call(json request) { return *Plan(*this, std::move(request)).next(); }

}  // namespace tdp
